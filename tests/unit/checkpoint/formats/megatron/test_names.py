"""One table of names, both ways; row orders are undone exactly; partitions are our model's own."""

import pytest
import torch

from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.formats.megatron.names import RowOrder
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.config.model import ModelConfig
from megatron.model.bert_model import bert_layers
from megatron.model.gpt_model import gpt_layers
from megatron.model.stage import PipelineStage
from megatron.mpu.partition import partition_of
from tests.support.models import tiny_build

MODELS = [
    {},
    {"swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True},
    {"position_embedding_type": "alibi", "embed_layernorm": True},
    {"position_embedding_type": "rope", "normalization": "RMSNorm", "qk_layernorm": True},
]


@pytest.mark.parametrize("untied", [True, False])
def test_every_name_of_a_bert_goes_there_and_back_and_is_split_as_the_model_splits_it(
    untied: bool,
) -> None:
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        untie_embeddings_and_output_weights=untied,
    )
    stage = PipelineStage(bert_layers(config, tiny_build()))
    for ours, parameter in stage.named_parameters():
        assert names.our_name(names.megatron_name(ours)) == ours
        assert names.partition_of_name(ours, gated=False) == partition_of(parameter), ours
    found = sorted((name for name, _ in stage.named_parameters()), key=names.module_order)
    assert found[2] == "embedding.tokentype.weight"
    after = found[found.index("final_norm.bias") + 1 :]
    assert [name for name in after if name != "output.weight"] == [
        "pooler.dense.weight", "pooler.dense.bias", "output_bias.bias",
        "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.norm.weight", "lm_head.norm.bias",
        "order_head.dense.weight", "order_head.dense.bias",
    ]  # fmt: skip
    beside = [name for name in found if names.is_beside_language_model(names.megatron_name(name))]
    assert found[-len(beside) :] == beside == after[-len(beside) :]


def _shapes(flags: dict[str, object]) -> list[str]:
    config = ModelConfig(num_layers=3, hidden_size=16, num_attention_heads=4, **flags)  # type: ignore[arg-type]
    return list(gpt_tensors(config, vocab_rows=12, positions=8))


@pytest.mark.parametrize("flags", MODELS)
def test_every_name_of_a_gpt_goes_there_and_back(flags: dict[str, object]) -> None:
    for ours in _shapes(flags):
        spelling = names.megatron_name(ours)
        assert names.is_parameter(spelling)
        assert names.our_name(spelling) == ours
        later = names.megatron_name(ours, first_layer=-5)
        assert names.our_name(later, first_layer=-5) == ours


@pytest.mark.parametrize(
    ("spelling", "ours"),
    [
        ("transformer.layers.1.attention.query_key_value.bias", "layers.3.attention.qkv.bias"),
        ("encoder.layers.0.post_attention_norm.weight", "layers.2.post_attention_norm.weight"),
        ("encoder.final_norm.weight", "final_norm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "layers.2.attention.qkv.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "layers.2.input_norm.weight",
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_bias",
            "layers.2.post_attention_norm.bias",
        ),
        ("decoder.layers.0.self_attention.linear_proj.bias", "layers.2.attention.output.bias"),
        ("decoder.final_layernorm.weight", "final_norm.weight"),
        ("embedding.word_embeddings.norm.weight", "embedding.norm.weight"),
        ("lm_head.norm.bias", "lm_head.norm.bias"),
        ("lm_head.layernorm.bias", "lm_head.norm.bias"),
        ("lm_head.layer_norm.weight", "lm_head.norm.weight"),
        ("output_layer.bias", "output_bias.bias"),
        ("binary_head.weight", "order_head.dense.weight"),
        ("retriever.dense.weight", None),
        ("encoder.layers.0.inter_attention.query.weight", None),
    ],
)
def test_older_and_newer_spellings_are_known(spelling: str, ours: str | None) -> None:
    assert names.our_name(spelling, first_layer=2) == ours


def test_what_is_computed_is_no_parameter() -> None:
    for name in (
        "decoder.layers.0.self_attention.linear_qkv._extra_state",
        "encoder.layers.0.self_attention.rotary_emb.inv_freq",
        "rotary_pos_emb.inv_freq",
        "inv_freq",
    ):
        assert not names.is_parameter(name)
    assert names.is_parameter("encoder.layers.0.mlp.dense_h_to_4h.weight")


@pytest.mark.parametrize("flags", MODELS)
def test_partitions_are_those_of_the_model_itself(flags: dict[str, object]) -> None:
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **flags)  # type: ignore[arg-type]
    for spec in gpt_layers(config, tiny_build()):
        if spec.tied and spec.call == "logits":
            continue
        for suffix, parameter in spec.build().named_parameters():
            name = f"{spec.name}.{suffix}"
            gated = names.is_gated({"model": flags})
            assert names.partition_of_name(name, gated=gated) == partition_of(parameter), name


def test_modules_are_sorted_as_megatron_registers_them() -> None:
    ours = [*_shapes(MODELS[2]), "output.weight"]
    found = sorted(reversed(ours), key=names.module_order)
    assert found[:4] == [
        "embedding.word.weight",
        "embedding.norm.weight",
        "embedding.norm.bias",
        "layers.0.input_norm.weight",
    ]
    assert found[-3:] == ["final_norm.weight", "final_norm.bias", "output.weight"]
    layers = [name for name in found if name.startswith("layers.")]
    assert [int(name.split(".")[1]) for name in layers] == sorted(
        int(name.split(".")[1]) for name in layers
    )


def test_rows_of_old_versions_are_put_in_our_order() -> None:
    heads, width, hidden = 3, 4, 5
    # The value of our row r encodes its head, its part of q k v, and its channel.
    ours = torch.tensor(
        [
            [head, kind, channel] + [0] * (hidden - 3)
            for head in range(heads)
            for kind in range(3)
            for channel in range(width)
        ]
    )
    by_kind = torch.stack(sorted(ours, key=lambda row: (row[1], row[0], row[2])))
    alternating = torch.stack(sorted(ours, key=lambda row: (row[0], row[2], row[1])))
    name = "layers.0.attention.qkv.weight"
    for version, stored in ((0.0, by_kind), (1.0, alternating), (2.0, ours), (3.0, ours)):
        order = RowOrder(version=version, head_width=width)
        assert torch.equal(order.to_ours(name, stored), ours)
        bias = stored[:, 0].clone()
        found = order.to_ours("layers.0.attention.qkv.bias", bias)
        assert torch.equal(found, ours[:, 0])
        assert order.to_ours("layers.0.mlp.fc2.weight", stored) is stored


def test_a_gate_that_stands_second_comes_first_and_back() -> None:
    order = RowOrder(gate_second=True)
    up, gate = torch.zeros(2, 3), torch.ones(2, 3)
    ours = order.to_ours("layers.0.mlp.fc1.weight", torch.cat([up, gate]))
    assert torch.equal(ours, torch.cat([gate, up]))
    back = order.from_ours("layers.0.mlp.fc1.weight", ours)
    assert torch.equal(back, torch.cat([up, gate]))


def test_the_order_of_rows_follows_from_the_flags() -> None:
    plain = {"num_attention_heads": 4, "hidden_size": 16}
    assert names.row_order({"model": plain}).head_width == 4
    assert names.row_order({"model": {**plain, "kv_channels": 8}}).head_width == 8
    # Megatron-LM's --swiglu has the gate first, bigscience's --glu-activation second.
    assert not names.row_order({"model": {**plain, "swiglu": True}}).gate_second
    assert names.row_order({"model": {**plain, "glu_activation": "swiglu"}}).gate_second
    assert names.is_gated({"model": {"glu_activation": "geglu"}})
    assert not names.is_gated({})


def test_only_rows_of_tokens_are_padded() -> None:
    assert names.has_vocabulary_rows("embedding.word.weight")
    assert names.has_vocabulary_rows("output.weight")
    assert not names.has_vocabulary_rows("embedding.position.weight")


@pytest.mark.parametrize(
    "name", ["layers.5.mlp.fc2.bias", "layers.5.input_norm.weight", "output.weight"]
)
def test_names_of_core_are_read_as_they_are_written(name: str) -> None:
    key = names.core_name(name, trunk="decoder", first_layer=3)
    assert key is not None
    assert names.our_name(key, first_layer=3) == name
    assert key != names.megatron_name(name, first_layer=3) or name == "output.weight"
