"""OLMo 2's config: what it says, and where its norms stand."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.olmo2 import OLMO2
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def test_the_release() -> None:
    """As on the hub: allenai/OLMo-2-1124-7B, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=500000,
        tie_word_embeddings=False,
    )
    config = from_plain(ModelConfig, OLMO2.read_config(fields))
    OLMO2.read_sizes(fields)
    assert fields.unread() == []
    assert config.norm_placement is NormPlacement.AFTER
    assert (config.qk_layernorm, config.qk_layernorm_scope) == (True, QkNormScope.ALL_HEADS)
    assert (config.rotary_base, config.layernorm_epsilon, config.tied) == (5e5, 1e-6, False)


def test_epsilon_has_the_default_of_its_own_class() -> None:
    assert from_plain(ModelConfig, OLMO2.read_config(fields_of())).layernorm_epsilon == 1e-5


def test_biases_in_attention_alone_are_refused() -> None:
    with pytest.raises(CheckpointError, match="biases in attention alone") as caught:
        OLMO2.read_config(fields_of(attention_bias=True))
    assert "'attention_bias' is True" in str(caught.value)
