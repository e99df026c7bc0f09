"""What keys about the network mean together."""

import math
from typing import Any

import pytest

from megatron.config.neox.network import initial_std, mlp_width
from megatron.config.run import RunConfig
from megatron.model.init import residual_init, weight_init
from tests.unit.config.neox.configs import a_config
from tests.unit.config.neox.runs import problem_of, run_of


def model_of(**changes: Any) -> Any:
    """The model of a config with these keys."""
    run: RunConfig = run_of(a_config(**changes))
    return run.model


@pytest.mark.parametrize(
    ("hidden", "keys", "gated", "width"),
    [
        (4096, {"intermediate": 32768, "multiple": 256}, True, 11008),  # Llama 7B
        (8192, {"intermediate": 28672 * 3, "multiple": 256}, True, 28672),  # Llama 2 70B
        (4096, {"multiple": 256}, True, 5632),
        (768, {}, False, 3072),
        (768, {"expansion": 2.5}, False, 1920),
        (7, {"intermediate": 13}, False, 14),  # rounded up to twice the multiple
        (8, {"intermediate": 17, "multiple": 8}, False, 32),
        (8, {}, True, 11),  # 32 * 2 / 3 = 21 of both, 22 rounded up
    ],
)
def test_widths_are_those_of_neoxs_rule(
    hidden: int, keys: dict[str, Any], gated: bool, width: int
) -> None:
    given = {"intermediate": None, "expansion": None, "multiple": 1} | keys
    assert mlp_width(hidden, gated=gated, **given) == width


def test_the_width_of_a_gated_mlp_is_that_of_each_half() -> None:
    keys = {"activation": "swiglu", "intermediate_size": 32, "mlp_multiple_of": 4}
    assert model_of(**keys).ffn_width == 12
    assert model_of().ffn_width == 32


def test_initial_values_have_neoxs_spreads() -> None:
    model = model_of(layers=3, hidden=10)
    assert weight_init(model).std == math.sqrt(2 / 50)
    assert residual_init(model).std == pytest.approx(2 / (3 * math.sqrt(10)), rel=1e-15)
    defaults = model_of(init_method="normal", output_layer_init_method="scaled_normal")
    assert (weight_init(defaults).std, residual_init(defaults).std) == (0.02, 0.02 / math.sqrt(4))
    both = dict.fromkeys(("init_method", "output_layer_init_method"), "xavier_uniform")
    assert model_of(**both).init_method_xavier_uniform
    assert initial_std("single_residual_scaled_normal", 0.1, hidden=1, layers=4) == 0.05


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"norm": "rmsnorm", "rms_norm_epsilon": 1e-6}, "layernorm_epsilon", 1e-6),
        ({"norm": "rmsnorm"}, "layernorm_epsilon", 1e-8),
        ({"norm": "rmsnorm", "use_bias_in_norms": False}, "normalization", "RMSNorm"),
        ({}, "layernorm_epsilon", 1e-5),
        ({"pos_emb": "learned"}, "max_position_embeddings", 2048),
        ({"pos_emb": "alibi"}, "position_embedding_type", "alibi"),
        ({"rotary_pct": 0.25}, "rotary_percent", 0.25),
        ({"rotary_emb_base": 500000}, "rotary_base", 500000.0),
        ({}, "activation", "gelu_erf"),
        ({"bias_gelu_fusion": True}, "activation", "gelu_tanh"),
        ({"bias_gelu_fusion": True, "onnx_safe": True}, "activation", "gelu_erf"),
        ({"activation": "GeGLU"}, "glu", "geglu"),
        ({"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}, "add_bias_linear", False),
        ({"num_kv_heads": 1}, "query_groups", 1),
        ({"gpt_j_residual": True}, "use_parallel_residual", True),
        ({"no_weight_tying": False}, "tied", True),
        ({}, "hidden_dropout", 0.0),
        (
            {"attention_config": [[["flash"], "all"]], "sliding_window_width": 7},
            "sliding_window",
            8,
        ),
        ({"attention_config": [[["flash", "global"], 1]]}, "sliding_window", None),
        ({"attention_config": ["flash", "Global"]}, "sliding_window", None),
    ],
)
def test_keys_become_fields(keys: dict[str, Any], field: str, value: object) -> None:
    assert getattr(model_of(**keys), field) == value


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"norm": "scalenorm"}, "this value has no counterpart here"),
        ({"use_bias_in_norms": False}, "a LayerNorm has a bias here"),
        ({"pos_emb": "sinusoidal"}, "this value has no counterpart here"),
        ({"max_position_embeddings": 16}, "it is less than the tokens of a sample"),
        ({"activation": "mish"}, "this value has no counterpart here"),
        ({"activation": "geglu", "bias_gelu_fusion": True}, "GEGLU has its exact form alone"),
        ({"use_bias_in_mlp": False}, "biases of attention and of MLPs are one flag here"),
        ({"attention_config": [[["gmlp"], 2]]}, "layers of the kind gmlp are not here"),
        ({"attention_config": [[["flash"], 3]]}, "it names 3 of 2 layers"),
        ({"attention_config": 3}, "it is no list of kinds and numbers"),
        ({"sliding_window_width": 7}, "neox has windows in flash layers alone"),
        ({"init_method": "orthogonal"}, "this distribution is not here"),
    ],
)
def test_what_has_no_counterpart_is_refused(keys: dict[str, Any], problem: str) -> None:
    assert problem_of(a_config(**keys)).problem == problem
