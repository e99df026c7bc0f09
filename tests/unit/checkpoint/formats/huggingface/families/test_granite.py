"""Granite's config: its four factors, and what stands for those that it does not have."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.granite import GRANITE
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, GRANITE.read_config(fields_of(**values)))


def test_the_release() -> None:
    """As on the hub: ibm-granite/granite-3.1-2b-base, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.1,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        hidden_act="silu",
        logits_scaling=8.0,
        mlp_bias=False,
        num_key_value_heads=2,
        residual_multiplier=0.22,
        rms_norm_eps=1e-05,
        rope_scaling=None,
        rope_theta=5000000.0,
        tie_word_embeddings=True,
    )
    config = from_plain(ModelConfig, GRANITE.read_config(fields))
    GRANITE.read_sizes(fields)
    assert fields.unread() == []
    assert (config.embedding_multiplier, config.residual_multiplier) == (12.0, 0.22)
    assert (config.softmax_scale, config.logit_divisor) == (0.015625, 8.0)


def test_a_scale_of_scores_that_is_absent_is_one_and_not_that_of_llama() -> None:
    assert read().softmax_scale == 1.0
    written = GRANITE.write_config(ModelConfig(**_SMALL), Sizes(50, 128))
    assert written["attention_multiplier"] == 0.5  # of heads of 4 channels


def test_a_factor_that_is_no_number_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a field of the wrong kind"):
        read(logits_scaling="8")


_SMALL: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "swiglu": True,
}
