"""BLOOM's config in its releases, which differ in the names of sizes."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.bloom import BLOOM
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig, PositionEmbedding
from megatron.errors import CheckpointError

SHAPE = {"n_layer": 2, "hidden_size": 32, "n_head": 4, "vocab_size": 50}


def read(fields: Fields) -> ModelConfig:
    return from_plain(ModelConfig, BLOOM.read_config(fields))


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def test_what_a_config_does_not_say() -> None:
    config = read(fields_of())
    assert config.position_embedding_type is PositionEmbedding.ALIBI
    assert config.activation is Activation.GELU_TANH
    assert all((config.embed_layernorm, config.tied, config.add_bias_linear))
    assert config.ffn_width == 128
    assert BLOOM.read_sizes(fields_of()) == Sizes(50, 2048)


def test_the_largest_release_has_other_names() -> None:
    """As on the hub: bigscience/bloom, but for its sizes."""
    released = {
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "layer_norm_epsilon": 1e-05,
        "n_embed": 48,
        "n_layer": 3,
        "num_attention_heads": 6,
        "pretraining_tp": 4,
        "seq_length": 128,
        "slow_but_exact": False,
        "vocab_size": 50,
    }
    fields = Fields(Path("config.json"), released)
    config = read(fields)
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (3, 48, 6)
    assert BLOOM.read_sizes(fields) == Sizes(50, 128)
    assert fields.unread() == []


def test_the_residual_is_taken_where_the_config_says() -> None:
    name = "apply_residual_connection_post_layernorm"
    for value in (False, True):
        config = read(fields_of(**{name: value}))
        assert config.apply_residual_connection_post_layernorm is value
        assert BLOOM.write_config(config, Sizes(50, 64))[name] is value


def test_a_config_without_a_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks a field") as caught:
        read(Fields(Path("x"), {"n_layer": 2, "hidden_size": 32}))
    assert "no 'num_attention_heads'" in str(caught.value)
