"""gpt-oss's config: what it says, what stands for what it does not, and quantized releases."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.gpt_oss import GPT_OSS
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.source import read_config
from megatron.config.fields import from_plain
from megatron.config.model import GluActivation, ModelConfig, RopeType, SoftmaxType
from megatron.errors import CheckpointError

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_local_experts": 8,
    "vocab_size": 50,
    "max_position_embeddings": 256,
    "rope_scaling": {"rope_type": "default"},
}


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, GPT_OSS.read_config(fields_of(**values)))


def test_the_release() -> None:
    """As on the hub: openai/gpt-oss-20b, but for its sizes and its quantization."""
    fields = fields_of(
        attention_bias=True,
        attention_dropout=0.0,
        experts_per_token=4,
        head_dim=64,
        hidden_act="silu",
        initial_context_length=4096,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts_per_tok=4,
        output_router_logits=False,
        rms_norm_eps=1e-05,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        rope_theta=150000,
        router_aux_loss_coef=0.9,
        sliding_window=128,
        swiglu_limit=7.0,
        tie_word_embeddings=False,
    )
    config = from_plain(ModelConfig, GPT_OSS.read_config(fields))
    GPT_OSS.read_sizes(fields)
    assert fields.unread() == []
    assert (config.sliding_window, config.layers_without_window) == (128, (1, 3))
    assert (config.rope_type, config.rotary_scaling_factor) == (RopeType.YARN, 32.0)
    assert (config.rotary_base, config.yarn_correction_range_round_to_int) == (150000, False)
    assert (config.glu, config.glu_linear_offset) == (GluActivation.QUICK_GEGLU, 1.0)
    assert (config.softmax_type, config.moe_router_add_bias) == (SoftmaxType.LEARNABLE, True)
    assert (config.num_experts, config.moe_router_topk, config.head_width) == (8, 4, 64)


def test_what_a_config_does_not_say() -> None:
    config = read()
    assert (config.sliding_window, config.layers_without_window) == (128, (1, 3))
    assert (config.activation_func_clamp_value, config.layernorm_epsilon) == (7.0, 1e-5)
    assert read(sliding_window=None).sliding_window is None
    with pytest.raises(CheckpointError, match="lacks a field"):
        read(rope_scaling=None)  # which is yarn there
    with pytest.raises(CheckpointError, match="lacks a field"):
        read(num_key_value_heads=None)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("attention_bias", False, "biases in the MLP alone"),
        ("hidden_act", "gelu", "another gate"),
        ("swiglu_alpha", 1.0, "another gate"),
        ("layer_types", ["full_attention"], "no model here does"),
    ],
)
def test_what_no_model_here_computes_is_refused(field: str, value: object, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        read(**{field: value})
    assert f"'{field}' is {value!r}" in str(caught.value)


def test_quantized_weights_are_refused_with_what_writes_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(CheckpointError, match="are quantized") as caught:
        read_config(path)
    assert "Mxfp4Config(dequantize=True)" in caught.value.fix
