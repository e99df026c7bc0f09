"""The flags about norms and factors of blocks: what does not go together."""

from typing import Any

import pytest

from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.model import PositionEmbedding, RopeType
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
