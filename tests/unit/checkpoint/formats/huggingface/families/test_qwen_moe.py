"""The fields of Qwen2-MoE and Qwen3-MoE: which layers have experts, shares, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE

EXPERTS = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | EXPERTS | values)


def read(family: Family, **values: Any) -> ModelConfig:
    return from_plain(ModelConfig, family.read_config(fields_of(**values)))


def test_the_first_release() -> None:
    """As on the hub: Qwen/Qwen1.5-MoE-A2.7B, but for its sizes."""
    fields = fields_of(
        hidden_act="silu",
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        sliding_window=32768,
        max_window_layers=21,
        use_sliding_window=False,
        attention_dropout=0.0,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        tie_word_embeddings=False,
        vocab_size=50,
    )
    config = from_plain(ModelConfig, QWEN2_MOE.read_config(fields))
    QWEN2_MOE.read_sizes(fields)
    assert fields.unread() == []
    assert (config.num_experts, config.moe_router_topk, config.expert_width) == (8, 4, 24)
    assert (config.moe_shared_expert_intermediate_size, config.moe_shared_expert_gate) == (40, True)
    assert config.moe_router_pre_softmax
    assert config.has_qkv_bias_alone
    assert all(config.expert_layers)
    assert config.sliding_window is None


def test_shares_and_spellings_of_qwen3() -> None:
    config = read(QWEN3_MOE, norm_topk_prob=True, num_experts=None, num_local_experts=6)
    assert (config.num_experts, config.moe_router_pre_softmax) == (6, False)
    assert config.qk_layernorm
    assert config.moe_shared_expert_intermediate_size is None
    with pytest.raises(CheckpointError, match="lacks a field"):
        read(QWEN3_MOE, num_experts=None)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"decoder_sparse_step": 2}, "0101"),
        ({"mlp_only_layers": [0, 3]}, "0110"),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, "0100"),
        ({"mlp_only_layers": None}, "1111"),
    ],
)
@pytest.mark.parametrize("family", [QWEN2_MOE, QWEN3_MOE], ids=lambda one: str(one.model_type))
def test_families_have_experts_in_some_layers(
    family: Family, fields: dict[str, Any], layers: str
) -> None:
    """And what is written is read again."""
    config = read(family, **fields)
    assert config.expert_layers == tuple(one == "1" for one in layers)
    written = family.write_config(config, Sizes(50, 128))
    back = from_plain(ModelConfig, family.read_config(Fields(Path("x"), written)))
    assert back.meaning() == config.meaning()
    assert ("head_dim" in written) == (family is QWEN3_MOE)


@pytest.mark.parametrize(
    ("family", "field", "value", "why"),
    [
        (QWEN2_MOE, "use_sliding_window", True, "a window in some layers"),
        (QWEN3_MOE, "use_sliding_window", True, "a window in some layers"),
        (QWEN2_MOE, "qkv_bias", False, "no biases in attention"),
        (QWEN3_MOE, "attention_bias", True, "biases in attention alone"),
        (QWEN2_MOE, "layer_types", ["sliding_attention"] * 4, "does"),
    ],
)
def test_what_no_model_here_computes_is_refused(
    family: Family, field: str, value: object, why: str
) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        read(family, **{field: value})
    assert f"'{field}' is {value!r}" in str(caught.value)
