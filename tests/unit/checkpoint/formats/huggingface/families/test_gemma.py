"""The configs of Gemma 2 and 3 in their releases, and the two spellings of two rotations."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.gemma import GEMMA2, GEMMA3
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.blocks import NormPlacement
from megatron.config.fields import from_plain
from megatron.config.model import GluActivation, ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def fields_of(**values: Any) -> Fields:
    return Fields(
        Path("config.json"), SHAPE | {"num_key_value_heads": 2, "num_hidden_layers": 7} | values
    )


def read(family: Family, **values: Any) -> ModelConfig:
    return from_plain(ModelConfig, family.read_config(fields_of(**values)))


def test_the_release_of_gemma_2() -> None:
    """As on the hub: google/gemma-2-2b, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=50.0,
        cache_implementation="hybrid",
        final_logit_softcapping=30.0,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=144,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        sliding_window=4096,
    )
    config = from_plain(ModelConfig, GEMMA2.read_config(fields))
    GEMMA2.read_sizes(fields)
    assert fields.unread() == []
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (config.score_scale, config.embedding_multiplier) == (1 / 12, 32**0.5)
    assert (config.glu, config.tied) == (GluActivation.GEGLU_TANH, True)
    assert config.norm_placement is NormPlacement.BOTH
    assert (config.sliding_window, config.layers_without_window) == (4096, (1, 3, 5))


def test_the_release_of_gemma_3() -> None:
    """As on the hub: google/gemma-3-1b-pt, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.0,
        attn_logit_softcapping=None,
        cache_implementation="hybrid",
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-06,
        rope_local_base_freq=10000,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    )
    config = from_plain(ModelConfig, GEMMA3.read_config(fields))
    GEMMA3.read_sizes(fields)
    assert fields.unread() == []
    assert (config.rotary_base, config.window_rotary_base) == (1e6, 1e4)
    assert (config.sliding_window, config.layers_without_window) == (512, (5,))
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    assert config.qk_layernorm


def test_caps_that_are_absent_are_those_of_transformers_and_null_is_none() -> None:
    assert (read(GEMMA2).attention_soft_cap, read(GEMMA2).logit_soft_cap) == (50.0, 30.0)
    config = read(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)


def test_both_spellings_of_two_rotations_are_read_and_one_is_written() -> None:
    old = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = read(
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old == new
    assert (new.rotary_seq_len_interpolation_factor, new.window_rotary_base) == (8.0, 1e4)
    written = Fields(Path("x"), GEMMA3.write_config(new, Sizes(50, 128)))
    assert from_plain(ModelConfig, GEMMA3.read_config(written)).meaning() == new.meaning()


def test_without_windows_there_is_one_rotation() -> None:
    config = read(GEMMA3, layer_types=["full_attention"] * 7)
    assert (config.sliding_window, config.window_rotary_base) == (None, None)
    assert read(GEMMA3, sliding_window=None).window_rotary_base is None


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("attention_bias", True, "biases in attention alone"),
        ("use_bidirectional_attention", True, "attention to later tokens"),
        ("hidden_activation", "silu", "no model here does"),
        ("layer_types", ["full_attention"], "no model here does"),
    ],
)
def test_what_no_model_here_computes_is_refused(field: str, value: object, why: str) -> None:
    for family in (GEMMA2, GEMMA3):
        with pytest.raises(CheckpointError, match=why) as caught:
            read(family, **{field: value})
        assert f"'{field}' is {value!r}" in str(caught.value)


def test_a_cap_of_scores_that_transformers_leaves_out_of_gemma_3_is_refused() -> None:
    with pytest.raises(CheckpointError, match="that its class leaves out"):
        read(GEMMA3, attn_logit_softcapping=50.0)


def test_a_scaling_of_layers_with_a_window_is_refused() -> None:
    rope: dict[str, Any] = {
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
    }
    with pytest.raises(CheckpointError, match="scaling in layers with a window") as caught:
        read(GEMMA3, rope_parameters=rope)
    assert "'rope_type' is 'linear'" in str(caught.value)
