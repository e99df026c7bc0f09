"""The shape of a network: what follows from the flags, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.fields import FieldsError
from megatron.config.model import (
    Activation,
    GluActivation,
    ModelConfig,
    PositionEmbedding,
    RopeType,
    SoftmaxType,
)
from megatron.errors import ConfigError
from tests.unit.config.groups import a_model


@pytest.mark.parametrize(
    "name",
    [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "num_query_groups",
        "max_position_embeddings",
    ],
)
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        a_model(**{name: 0})
    assert "a size is not positive" in str(caught.value)
    assert f"--{name.replace('_', '-')} 0" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("rotary_base", "layernorm_epsilon", "init_method_std", "output_layer_init_method_std"),
        "rotary_scaling_factor",
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="it is not a positive number") as caught:
        a_model(**{name: value})
    assert caught.value.found == f"--{name.replace('_', '-')} {value}"


def test_a_standard_deviation_beside_xavier_uniform_is_refused() -> None:
    with pytest.raises(ConfigError, match="drawn from Xavier uniform") as caught:
        a_model(output_layer_init_method_std=0.1, init_method_xavier_uniform=True)
    assert caught.value.found == "--output-layer-init-method-std 0.1, --init-method-xavier-uniform"


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_a_dropout_is_a_probability_below_one(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=r"a dropout probability is outside \[0, 1\)"):
        a_model(**{name: value})


def test_a_hidden_size_that_does_not_divide_names_two_that_do() -> None:
    with pytest.raises(ConfigError, match="does not divide into attention heads") as caught:
        a_model(hidden_size=100, num_attention_heads=12)
    assert caught.value.found == "--hidden-size 100, --num-attention-heads 12"
    assert "--hidden-size 96 or 108" in caught.value.fix


@given(hidden=st.integers(1, 300), heads=st.integers(1, 40))
def test_the_sizes_that_a_fix_names_are_accepted(hidden: int, heads: int) -> None:
    try:
        a_model(hidden_size=hidden, num_attention_heads=heads)
    except ConfigError as error:
        sizes = [int(word.strip(",")) for word in error.fix.split() if word.strip(",").isdigit()]
        assert len(sizes) == 2
        for size in sizes:
            assert a_model(hidden_size=size, num_attention_heads=heads).head_width * heads == size


def test_a_head_width_frees_the_hidden_size() -> None:
    assert a_model(hidden_size=100, num_attention_heads=12, kv_channels=16).head_width == 16


def test_query_groups_divide_the_heads() -> None:
    with pytest.raises(ConfigError, match="cannot be shared out evenly") as caught:
        a_model(hidden_size=12, num_attention_heads=12, num_query_groups=5)
    assert caught.value.fix == "use one of 1, 2, 3, 4, 6, 12 query groups"


@pytest.mark.parametrize(
    ("switches", "found"),
    [
        ({"swiglu": True, "squared_relu": True}, "--swiglu, --squared-relu"),
        ({"relu": True, "onnx_safe": True}, "--relu, --onnx-safe"),
        ({"openai_gelu": True, "onnx_safe": True}, "--openai-gelu, --onnx-safe"),
        (
            {"swiglu": True, "glu_activation": GluActivation.REGLU},
            "--swiglu, --glu-activation reglu",
        ),
    ],
)
def test_more_than_one_activation_is_refused(switches: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match="more than one activation was asked for") as caught:
        a_model(**switches)
    assert caught.value.found == found


def test_the_two_names_of_swiglu_are_one() -> None:
    config = a_model(swiglu=True, glu_activation=GluActivation.SWIGLU)
    assert config.glu is GluActivation.SWIGLU


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_the_rotating_share_is_more_than_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(ConfigError, match=r"the rotating share of a head is outside \(0, 1\]"):
        a_model(position_embedding_type=PositionEmbedding.ROPE, rotary_percent=share)


@pytest.mark.parametrize(
    ("switches", "activation"),
    [
        ({}, Activation.GELU_TANH),
        ({"openai_gelu": True}, Activation.GELU_TANH),
        ({"onnx_safe": True}, Activation.GELU_ERF),
        ({"squared_relu": True}, Activation.SQUARED_RELU),
        ({"relu": True}, Activation.RELU),
        ({"swiglu": True}, Activation.SILU),
        ({"glu_activation": GluActivation.GEGLU}, Activation.GELU_ERF),
        ({"glu_activation": GluActivation.LIGLU}, Activation.IDENTITY),
        ({"glu_activation": GluActivation.REGLU}, Activation.RELU),
    ],
)
def test_switches_choose_the_activation(switches: dict[str, Any], activation: Activation) -> None:
    assert a_model(**switches).activation is activation


@pytest.mark.parametrize(
    ("switches", "width"),
    [
        ({"hidden_size": 768}, 3072),
        ({"hidden_size": 768, "ffn_hidden_size": 1000}, 1000),
        ({"hidden_size": 4096, "swiglu": True}, 10880),  # 8/3 x 4096 = 10922.7, down to 64s
        ({"hidden_size": 8, "swiglu": True}, 64),
    ],
)
def test_the_width_of_the_mlp_follows_from_what_was_asked(
    switches: dict[str, Any], width: int
) -> None:
    assert a_model(**switches).ffn_width == width


def test_query_groups_are_heads_unless_asked_for() -> None:
    assert a_model().query_groups == 2
    assert a_model(num_query_groups=1).query_groups == 1


def test_embeddings_are_tied_unless_untied() -> None:
    assert a_model().tied
    assert not a_model(untie_embeddings_and_output_weights=True).tied


def test_all_that_is_wrong_is_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        a_model(num_layers=0, hidden_dropout=2.0, swiglu=True, squared_relu=True)
    assert len(caught.value.errors) == 3


SMALL = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"num_query_groups": 4, "kv_channels": 24, "ffn_hidden_size": 384}),
        ({}, {"openai_gelu": True}),
        ({"swiglu": True}, {"glu_activation": GluActivation.SWIGLU, "ffn_hidden_size": 256}),
        ({}, {"add_qkv_bias": True}),
        ({}, {"rotary_base": 5.0, "rope_scaling_factor": 2.0}),
        ({}, {"mscale": 2.0, "rotary_scaling_factor": 2.0, "yarn_beta_fast": 9.0}),
        (
            {"position_embedding_type": PositionEmbedding.ROPE},
            {"position_embedding_type": PositionEmbedding.ROPE, "rope_scaling_factor": 2.0},
        ),
    ],
)
def test_two_spellings_of_one_network_mean_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert ModelConfig(**SMALL, **one).meaning() == ModelConfig(**SMALL, **other).meaning()


@pytest.mark.parametrize(
    "change",
    [
        {"num_query_groups": 2},
        {"onnx_safe": True},
        {"add_bias_linear": False},
        {"use_parallel_residual": True},
        {"qk_layernorm": True},
        {"sliding_window": 4},
        {"sliding_window": 4, "window_attn_skip_freq": "2"},
        {"softmax_type": SoftmaxType.OFF_BY_ONE},
        {"glu_activation": GluActivation.SWIGLU, "glu_linear_offset": 1.0},
        {"layernorm_epsilon": 1e-6},
        {"position_embedding_type": PositionEmbedding.ROPE},
    ],
)
def test_another_network_means_something_else(change: dict[str, Any]) -> None:
    assert ModelConfig(**SMALL, **change).meaning() != ModelConfig(**SMALL).meaning()


ROPE = {"position_embedding_type": PositionEmbedding.ROPE}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sliding_window": 0}, "a size is not positive"),
        ({"window_attn_skip_freq": "2"}, "in a model without windows"),
        ({"glu_linear_offset": 1.0}, "and the MLP has none"),
        ({"activation_func_clamp_value": 7.0}, "and the MLP has none"),
        ({"swiglu": True, "activation_func_clamp_value": -7.0}, "not a positive number"),
        ({"sliding_window": 4, "window_attn_skip_freq": "[1]"}, "not of as many layers"),
        (
            {"use_parallel_residual": True, "apply_residual_connection_post_layernorm": True},
            "attention and MLP side by side",
        ),
        ({"use_rope_scaling": True}, "in a model that does not rotate"),
        ({"rope_type": RopeType.YARN}, "in a model that does not rotate"),
        ({**ROPE, "rope_type": RopeType.YARN, "use_rope_scaling": True}, "scaled in two ways"),
        ({"yarn_beta_fast": 1.0}, "slow and fast rotary frequencies are not in order"),
        ({"yarn_beta_slow": 0.0}, "slow and fast rotary frequencies are not in order"),
        ({"mscale": -1.0}, "it is not a number from 0 up"),
        ({"mscale_all_dim": float("inf")}, "it is not a number from 0 up"),
        ({"yarn_original_max_position_embeddings": 0}, "a size is not positive"),
        ({"rotary_seq_len_interpolation_factor": 2.0}, "in a model that does not rotate"),
        ({"no_rope_freq": "2"}, "in a model that does not rotate"),
        ({**ROPE, "no_rope_freq": "[1]"}, "not of as many layers"),
        (
            {**ROPE, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
            "scaled in two ways",
        ),
        ({**ROPE, "rotary_seq_len_interpolation_factor": -1.0}, "it is not a positive number"),
        (
            {**ROPE, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
            "slow and fast rotary frequencies are not in order",
        ),
    ],
)
def test_switches_of_the_newer_families_that_make_no_sense_are_refused(
    values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ModelConfig(**SMALL, **values)


def test_layers_that_do_not_rotate() -> None:
    every = ModelConfig(**SMALL, **ROPE)
    last = ModelConfig(**SMALL, **ROPE, no_rope_freq="2")
    listed = ModelConfig(**SMALL, **ROPE, no_rope_freq="[0, 1]")
    assert (every.layers_without_rotation, last.layers_without_rotation) == ((), (1,))
    assert last.fields_that_differ(listed) == []
    assert last.fields_that_differ(every) == ["no_rope_freq"]
    assert every.fields_that_differ(ModelConfig(**SMALL, **ROPE, no_rope_freq="[0]*2")) == []


def test_layers_without_the_window_of_others() -> None:
    every = ModelConfig(**SMALL, sliding_window=4)
    last = ModelConfig(**SMALL, sliding_window=4, window_attn_skip_freq="2")
    listed = ModelConfig(**SMALL, sliding_window=4, window_attn_skip_freq="[1,0]")
    first = ModelConfig(**SMALL, sliding_window=4, window_attn_skip_freq="[0,1]")
    assert (every.layers_without_window, last.layers_without_window) == ((), (1,))
    assert first.layers_without_window == (0,)
    assert last.fields_that_differ(listed) == []
    assert last.fields_that_differ(every) == ["window_attn_skip_freq"]


def test_what_makes_another_network_is_named_as_it_was_spelled() -> None:
    base = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    plain = ModelConfig(**base)
    assert plain.fields_that_differ(ModelConfig(**base, kv_channels=8, openai_gelu=True)) == []
    gated = ModelConfig(**(base | {"hidden_size": 64}), swiglu=True)
    assert plain.fields_that_differ(gated) == ["hidden_size", "swiglu"]
    assert gated.fields_that_differ(plain) == ["hidden_size", "swiglu"]
    rotary = ModelConfig(**base, position_embedding_type=PositionEmbedding.ROPE, rotary_base=5.0)
    assert plain.fields_that_differ(rotary) == ["position_embedding_type", "rotary_base"]
