"""Every family has a place for every tensor that the models it holds can have."""

import dataclasses

import pytest

from megatron.checkpoint.formats.hf_families.registry import FAMILIES
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.config.model import Normalization, PositionEmbedding
from tests.support.models import tiny_config

LLAMA = {
    "position_embedding_type": PositionEmbedding.ROPE,
    "normalization": Normalization.RMS_NORM,
    "swiglu": True,
    "add_bias_linear": False,
}
HELD = {
    "gpt2": [{}, {"untie_embeddings_and_output_weights": True}, {"onnx_safe": True}],
    "gpt_neox": [
        {"position_embedding_type": PositionEmbedding.ROPE, "use_parallel_residual": parallel}
        for parallel in (False, True)
    ],
    "llama": [LLAMA, {**LLAMA, "add_bias_linear": True, "num_query_groups": 2, "kv_channels": 6}],
    "mistral": [LLAMA, {**LLAMA, "sliding_window": 4}],
    "qwen2": [{**LLAMA, "add_qkv_bias": True, "sliding_window": 4}],
    "qwen3": [{**LLAMA, "qk_layernorm": True, "kv_channels": 6}],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_has_a_rule_and_every_key_is_used_once(name: str) -> None:
    family = FAMILIES[name]
    for changes in HELD[name]:
        config = tiny_config(**changes)
        assert list(family.lacks(config)) == []
        keys: list[str] = []
        for ours in gpt_tensors(config, vocab_rows=50, positions=12):
            keys += family.rule(ours)[1]
        assert len(keys) == len(set(keys))
        layers = [key for key in keys if ".1." in key]
        assert len(layers) == len([key for key in keys if ".0." in key]) > 5
        assert all(key.startswith(family.prefix) or key in family.head for key in keys)
        assert not any(family.is_buffer(key) for key in keys)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_lacks_is_spelled_as_a_flag(name: str) -> None:
    family, config = FAMILIES[name], tiny_config(**HELD[name][0])
    for change, told in (
        ({"embed_layernorm": True}, "--embed-layernorm True"),
        ({"position_embedding_type": PositionEmbedding.ALIBI}, "--position-embedding-type alibi"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection"),
    ):
        lacking = list(family.lacks(dataclasses.replace(config, **change)))
        assert any(text.startswith(told) for text in lacking)


def test_families_of_plain_heads_say_so() -> None:
    wide = tiny_config(kv_channels=6)
    assert list(FAMILIES["gpt2"].lacks(wide)) == ["--kv-channels 6 (gpt2 has 4)"]
    grouped = tiny_config(num_query_groups=2)
    assert list(FAMILIES["gpt2"].lacks(grouped)) == ["--num-query-groups 2 (gpt2 has 4)"]
