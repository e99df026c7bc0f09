"""OPT's config: what it says, and what no model here computes."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.opt import OPT
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig
from megatron.errors import CheckpointError
from tests.support.models import tiny_config

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 50,
}


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, OPT.read_config(fields_of(**values)))


def test_the_release() -> None:
    """As on the hub: facebook/opt-1.3b, but for its sizes."""
    fields = fields_of(
        _remove_final_layer_norm=False,
        activation_function="relu",
        attention_dropout=0.0,
        do_layer_norm_before=True,
        dropout=0.1,
        init_std=0.02,
        layerdrop=0.0,
        max_position_embeddings=2048,
        prefix="</s>",
        word_embed_proj_dim=32,
    )
    config = from_plain(ModelConfig, OPT.read_config(fields))
    assert OPT.read_sizes(fields).positions == 2048
    assert fields.unread() == []
    assert (config.activation, config.tied, config.add_bias_linear) == (Activation.RELU, True, True)
    assert (config.hidden_dropout, config.attention_dropout) == (0.1, 0.0)


def test_galactica_is_an_opt_with_another_activation() -> None:
    config = read(activation_function="gelu", enable_bias=False, tie_word_embeddings=False)
    assert (config.activation, config.add_bias_linear) == (Activation.GELU_ERF, False)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("do_layer_norm_before", False, "norms after additions, as in OPT-350m"),
        ("word_embed_proj_dim", 16, "a projected embedding, as in OPT-350m"),
        ("_remove_final_layer_norm", True, "no norm at the end"),
        ("layer_norm_elementwise_affine", False, "norms without parameters"),
        ("layerdrop", 0.1, "layers that training leaves out"),
        ("activation_function", "silu", "no model here does"),
    ],
)
def test_what_no_model_here_computes_is_refused(field: str, value: object, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        read(**{field: value})
    assert f"'{field}' is {value!r}" in str(caught.value)


def test_another_epsilon_has_no_field() -> None:
    config = tiny_config(relu=True, layernorm_epsilon=1e-6)
    assert list(OPT.lacks(config)) == ["--layernorm-epsilon 1e-06 (opt has 1e-05)"]
