"""Names of Megatron-DeepSpeed, plain and in pipelines."""

import pytest

from megatron.checkpoint.formats.deepspeed.names import first_block, known_parameters
from megatron.errors import CheckpointError
from megatron.mpu.partition import Partition

CONFIG = {"model": {"hidden_size": 4, "swiglu": True}}


def test_a_plain_models_names_are_ours_with_their_splits() -> None:
    found = known_parameters(
        [
            "module.language_model.embedding.word_embeddings.weight",
            "language_model.embedding.position_embeddings.weight",
            "language_model.encoder.layers.11.self_attention.query_key_value.bias",
            "language_model.transformer.layers.2.attention.dense.weight",
            "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight",
            "language_model.encoder.final_layernorm.bias",
            "language_model.output_layer.weight",
        ],
        CONFIG,
        vocab_rows=10,
    )
    assert [(p.name, p.partition, p.shape, p.tied) for p in found.values()] == [
        ("embedding.word.weight", Partition("tp", 0), (10, 4), True),
        ("embedding.position.weight", None, None, False),
        ("layers.11.attention.qkv.bias", Partition("tp", 0), None, False),
        ("layers.2.attention.output.weight", Partition("tp", 1), None, False),
        ("layers.0.mlp.fc1.weight", Partition("tp", 0, blocks=2), None, False),
        ("final_norm.bias", None, None, False),
        ("output.weight", Partition("tp", 0), (10, 4), False),
    ]


def test_a_berts_heads_are_named_and_split_too() -> None:
    found = known_parameters(
        [
            "module.language_model.embedding.tokentype_embeddings.weight",
            "language_model.pooler.dense.bias",
            "lm_head.bias",
            "lm_head.dense.weight",
            "lm_head.layernorm.weight",
            "binary_head.bias",
        ],
        CONFIG,
        vocab_rows=10,
    )
    assert [(p.name, p.partition, p.shape) for p in found.values()] == [
        ("embedding.tokentype.weight", None, None),
        ("pooler.dense.bias", None, None),
        ("output_bias.bias", Partition("tp", 0), (10,)),
        ("lm_head.dense.weight", None, None),
        ("lm_head.norm.weight", None, None),
        ("order_head.dense.bias", None, None),
    ]


@pytest.mark.parametrize("first", [2, 3])
def test_block_0_of_a_pipeline_is_where_the_blocks_begin(first: int) -> None:
    names = [
        "tied_modules.embed.word_embeddings.weight",
        "tied_modules.embed.word_embeddings.norm.bias",
        f"{first + 10}.mlp.dense_4h_to_h.weight",
        f"{first}.input_layernorm.weight",
        f"{first + 12}.weight",
        f"{first + 13}.lm_head.weight",
        "1.position_embeddings.weight",
    ]
    assert first_block(names) == first
    found = known_parameters(names, CONFIG, vocab_rows=None)
    assert [p.name for p in found.values()] == [
        "embedding.word.weight",
        "embedding.norm.bias",
        "layers.10.mlp.fc2.weight",
        "layers.0.input_norm.weight",
        "final_norm.weight",
        "output.weight",
        "embedding.position.weight",
    ]


def test_names_that_mean_nothing_are_listed() -> None:
    names = [f"vision.{at}.patch" for at in range(7)]
    with pytest.raises(CheckpointError, match=r"does not know\n.*vision.0.patch.*and 2 more"):
        known_parameters(names, CONFIG, vocab_rows=None)
