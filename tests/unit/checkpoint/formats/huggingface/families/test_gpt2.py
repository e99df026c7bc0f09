"""Values of GPT-2's config that our model does not support, and its defaults."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.gpt2 import GPT2
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig
from megatron.errors import CheckpointError

SHAPE = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 50}


def read(**values: Any) -> ModelConfig:
    fields = Fields(Path("config.json"), SHAPE | values)
    return from_plain(ModelConfig, GPT2.read_config(fields))


def test_defaults_are_those_of_the_release() -> None:
    config = read()
    assert config.activation is Activation.GELU_TANH
    assert config.ffn_width == 64
    assert config.max_position_embeddings == 1024
    assert config.tied


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gelu_new", Activation.GELU_TANH),
        ("gelu_pytorch_tanh", Activation.GELU_TANH),
        ("gelu", Activation.GELU_ERF),
        ("relu2", Activation.SQUARED_RELU),
    ],
)
def test_activations_are_told_apart(name: str, activation: Activation) -> None:
    assert read(activation_function=name).activation is activation


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation_function": "relu"}, "'activation_function' is 'relu'"),
        ({"scale_attn_weights": False}, "'scale_attn_weights' is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' is True"),
        ({"add_cross_attention": True}, "'add_cross_attention' is True"),
    ],
)
def test_what_no_model_here_computes_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read(**values)
    assert message in str(caught.value)
