"""GPT-NeoX's defaults are its own, and values that our model does not support are refused."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.gpt_neox import GPT_NEOX
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig
from megatron.errors import CheckpointError

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
}


def read(**values: Any) -> ModelConfig:
    fields = Fields(Path("config.json"), SHAPE | values)
    return from_plain(ModelConfig, GPT_NEOX.read_config(fields))


def test_defaults_are_those_of_the_release() -> None:
    config = read()
    assert config.use_parallel_residual
    assert config.rotary_percent == 0.25
    assert config.activation is Activation.GELU_ERF
    assert not config.tied


def test_the_rotating_share_is_read_from_both_spellings() -> None:
    assert read(rotary_pct=0.5).rotary_percent == 0.5
    rope = {"rope_theta": 9.0, "partial_rotary_factor": 0.75, "rope_type": "default"}
    config = read(rope_parameters=rope)
    assert (config.rotary_percent, config.rotary_base) == (0.75, 9.0)
    assert read(rotary_emb_base=7).rotary_base == 7.0


def test_biases_in_the_mlp_alone_are_refused() -> None:
    with pytest.raises(CheckpointError, match="biases in the MLP alone") as caught:
        read(attention_bias=False)
    assert "'attention_bias' is False" in str(caught.value)
