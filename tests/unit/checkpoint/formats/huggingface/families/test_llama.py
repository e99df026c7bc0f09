"""LLaMA's config in all its releases."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.llama import LLAMA
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import GluActivation, ModelConfig
from megatron.errors import CheckpointError

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def read(**values: Any) -> ModelConfig:
    fields = Fields(Path("config.json"), SHAPE | values)
    return from_plain(ModelConfig, LLAMA.read_config(fields))


def test_the_first_release_says_little() -> None:
    config = read()
    assert config.query_groups == 4
    assert config.num_query_groups is config.kv_channels is None
    assert config.layernorm_epsilon == 1e-6
    assert config.glu is GluActivation.SWIGLU
    assert not config.add_bias_linear
    assert not config.tied


def test_groups_and_wide_heads_are_read_where_they_differ() -> None:
    config = read(num_key_value_heads=2, head_dim=16)
    assert (config.query_groups, config.head_width) == (2, 16)
    assert read(num_key_value_heads=4, head_dim=8) == read()


def test_biases_are_all_or_none() -> None:
    assert read(attention_bias=True, mlp_bias=True).add_bias_linear
    with pytest.raises(CheckpointError, match="one half of a block alone") as caught:
        read(attention_bias=True)
    assert "'mlp_bias' is False" in str(caught.value)


def test_another_activation_is_refused() -> None:
    assert read(hidden_act="gelu").glu is GluActivation.GEGLU
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read(hidden_act="gelu_new")
    assert "'hidden_act' is 'gelu_new'" in str(caught.value)


def test_smollm_is_a_tied_llama() -> None:
    """As on the hub: HuggingFaceTB/SmolLM2-135M, but for its sizes."""
    released = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "is_llama_config": True,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
    }
    fields = Fields(Path("config.json"), SHAPE | released)
    config = from_plain(ModelConfig, LLAMA.read_config(fields))
    LLAMA.read_sizes(fields)
    assert config.tied
    assert (config.rotary_base, config.layernorm_epsilon) == (100000.0, 1e-5)
    # Two names that no class of transformers reads.
    assert fields.unread() == ["is_llama_config", "rope_interleaved"]
