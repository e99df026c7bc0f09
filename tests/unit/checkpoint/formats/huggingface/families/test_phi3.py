"""Phi-3's config: what rotates, what is dropped, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.phi3 import PHI3
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, PHI3.read_config(fields_of(**values)))


def test_the_first_release() -> None:
    """As on the hub: microsoft/Phi-3-mini-4k-instruct, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.0,
        embd_pdrop=0.0,
        hidden_act="silu",
        num_key_value_heads=4,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=10000.0,
        sliding_window=2047,
        tie_word_embeddings=False,
    )
    config = from_plain(ModelConfig, PHI3.read_config(fields))
    assert PHI3.read_sizes(fields) == Sizes(50, 128)
    assert fields.unread() == []
    assert (config.sliding_window, config.rotary_percent, config.tied) == (2047, 1.0, False)


def test_what_a_config_does_not_say() -> None:
    config = read()
    assert (config.layernorm_epsilon, config.hidden_dropout) == (1e-5, 0.0)
    assert (config.rotary_percent, config.sliding_window) == (1.0, None)


def test_the_rotating_share_is_read_from_both_spellings_and_written() -> None:
    config = read(partial_rotary_factor=0.75)
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rope_type": "default"}
    assert config == read(rope_parameters=rope)
    assert config.rotary_percent == 0.75
    assert PHI3.write_config(config, Sizes(50, 128))["partial_rotary_factor"] == 0.75


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "'rope_scaling.rope_type' is 'longrope'",
        ),
        ({"rope_parameters": {"rope_type": "su"}}, "'rope_parameters.rope_type' is 'su'"),
        ({"attention_bias": True}, "'attention_bias' is True"),
    ],
)
def test_what_no_model_here_computes_is_refused(values: dict[str, Any], found: str) -> None:
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read(**values)
    assert found in str(caught.value)
