"""The flags about norms and factors of blocks: what does not go together."""

import math
from typing import Any

import pytest

from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import ModelConfig, PositionEmbedding, RopeType
from megatron.errors import ConfigError
from tests.unit.config.groups import a_model


def test_a_placement_says_on_which_sides_of_a_branch_norms_stand() -> None:
    sides = {place: (place.is_before, place.is_after) for place in NormPlacement}
    assert sides == {
        NormPlacement.BEFORE: (True, False),
        NormPlacement.AFTER: (False, True),
        NormPlacement.BOTH: (True, True),
    }


@pytest.mark.parametrize(
    ("changes", "message", "found"),
    [
        (
            {
                "norm_placement": NormPlacement.AFTER,
                "apply_residual_connection_post_layernorm": True,
            },
            "after norms that do not exist",
            "--apply-residual-connection-post-layernorm, --norm-placement after",
        ),
        (
            {"qk_layernorm_scope": QkNormScope.ALL_HEADS},
            "norms of queries and keys were described",
            "--qk-layernorm-scope all-heads without --qk-layernorm",
        ),
        (
            {"window_rotary_base": 50.0, "position_embedding_type": PositionEmbedding.ROPE},
            "layers with a window were to rotate otherwise",
            "--window-rotary-base 50.0, --sliding-window None, --position-embedding-type rope",
        ),
        (
            {"window_rotary_base": 50.0, "sliding_window": 4},
            "layers with a window were to rotate otherwise",
            "--window-rotary-base 50.0, --sliding-window 4, "
            "--position-embedding-type learned_absolute",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], message: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        a_model(**changes)
    assert caught.value.found == found


@pytest.mark.parametrize(
    "name",
    [
        *("embedding_multiplier", "residual_multiplier", "softmax_scale", "logit_divisor"),
        *("attention_soft_cap", "logit_soft_cap"),
    ],
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_are_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="it is not a positive number") as caught:
        a_model(**{name: value})
    assert caught.value.found == f"--{name.replace('_', '-')} {value}"


def test_residuals_after_norms_may_have_norms_after_branches() -> None:
    both = a_model(norm_placement=NormPlacement.BOTH, apply_residual_connection_post_layernorm=True)
    assert both.norm_placement.is_before


def test_the_scale_of_scores_is_that_of_vaswani_unless_it_is_given() -> None:
    assert (a_model(kv_channels=16).score_scale, a_model(kv_channels=16).query_factor) == (0.25, 1)
    given = a_model(kv_channels=16, softmax_scale=0.5)
    assert (given.score_scale, given.query_factor) == (0.5, 2.0)
    assert (
        a_model(kv_channels=16, softmax_scale=0.25).meaning() == a_model(kv_channels=16).meaning()
    )


def test_layers_with_a_window_may_rotate_from_another_base_and_unscaled() -> None:
    config = a_model(
        position_embedding_type=PositionEmbedding.ROPE,
        sliding_window=4,
        window_rotary_base=50.0,
        rope_type=RopeType.YARN,
        rotary_scaling_factor=4.0,
    )
    own = config.of_windows
    assert own is not None
    assert (own.rotary_base, own.rope_type, own.of_windows) == (50.0, RopeType.ROPE, None)


def mup(**flags: object) -> ModelConfig:
    return a_model(hidden_size=64, num_attention_heads=4, num_layers=2, use_mup=True, **flags)


def test_factors_of_mup_follow_from_the_width_of_another_model() -> None:
    model = mup(mup_base_hidden_size=16, mup_base_head_dim=4, init_method_std=0.1)
    assert model.width_multiplier == 4
    assert model.score_scale == 2 / 16  # sqrt(4) / 16: at a width of 4 it is 1 / sqrt(4)
    assert model.query_factor == pytest.approx(model.score_scale * 4)
    assert model.logit_denominator == 4
    assert model.embedding_factor == 1
    assert model.matrix_init_std == pytest.approx(0.05)
    assert model.residual_init_std == pytest.approx(0.05 / math.sqrt(4))
    given = mup(mup_base_hidden_size=16, mup_embedding_mult=3.0, mup_output_mult=0.5)
    assert (given.embedding_factor, given.logit_denominator) == (3, 2)
    assert given.score_scale == 1 / 16


def test_without_another_width_scores_alone_differ() -> None:
    plain, same = a_model(hidden_size=64, num_attention_heads=4), mup(mup_attn_scale_power=0.5)
    for name in ("width_multiplier", "score_scale", "logit_denominator", "matrix_init_std"):
        assert getattr(plain, name) == pytest.approx(getattr(same, name)), name
    assert plain.query_factor == 1.0
    assert mup().score_scale == plain.score_scale / 4


def test_a_network_of_mup_is_that_of_its_factors() -> None:
    """Checkpoints are told apart by what is computed, not by how flags spell it."""
    wide = mup(mup_base_hidden_size=16, mup_embedding_mult=2.0)
    spelled = a_model(
        hidden_size=64,
        num_attention_heads=4,
        num_layers=2,
        softmax_scale=1 / 16,
        logit_divisor=4.0,
        embedding_multiplier=2.0,
    )
    assert wide.fields_that_differ(spelled) == []
    assert wide.fields_that_differ(mup(mup_embedding_mult=2.0)) == ["mup_base_hidden_size"]


@pytest.mark.parametrize(
    ("flags", "problem", "found"),
    [
        ({"mup_base_hidden_size": 0}, "it is not positive", "--mup-base-hidden-size 0"),
        ({"mup_base_head_dim": -1.0}, "it is not positive", "--mup-base-head-dim -1.0"),
        ({"mup_output_mult": 0.0}, "not a positive number", "--mup-output-mult 0.0"),
        ({"mup_attn_scale_power": math.inf}, "not a positive", "--mup-attn-scale-power inf"),
        ({"softmax_scale": 0.5}, "given twice", "--use-mup, --softmax-scale 0.5"),
        ({"init_method_xavier_uniform": True}, "two rules", "--init-method-xavier-uniform"),
        (
            {"use_mup": False, "mup_output_mult": 2.0},
            "without muP",
            "--mup-output-mult without --use-mup",
        ),
    ],
)
def test_flags_of_mup_that_do_not_fit_are_refused(
    flags: dict[str, object], problem: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        mup(**flags) if "use_mup" not in flags else a_model(**flags)
    assert found in caught.value.found
