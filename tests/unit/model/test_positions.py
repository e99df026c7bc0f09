"""Rotation, slopes and the learned table: their defining properties."""

import math

import pytest
import torch

from megatron.config.model import PositionEmbedding, RopeType
from megatron.errors import ConfigError
from megatron.model.positions import (
    LearnedPositions,
    RotaryAngles,
    Rotation,
    alibi_slopes,
    rotary_frequencies,
)
from megatron.mpu.partition import Init, is_sequence_parallel
from megatron.ops.rotary import rotate
from tests.support.models import tiny_config

# float64; angles of up to a few thousand radians lose four of sixteen digits.
ANGLE = {"rtol": 1e-11, "atol": 1e-11}


def rope(**changes: object) -> RotaryAngles:
    config = tiny_config(position_embedding_type=PositionEmbedding.ROPE, kv_channels=8, **changes)
    return RotaryAngles(config)


def heads(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 2, 3, 1, 8, dtype=torch.float64, generator=generator)


def test_scores_of_rotated_heads_depend_on_the_distance_alone() -> None:
    q, k = heads(6, 1), heads(6, 2)
    here = rope().at(torch.arange(6), torch.float64)
    there = rope().at(torch.arange(6) + 4000, torch.float64)

    def scores(rotation: Rotation) -> torch.Tensor:
        return torch.einsum("sbgnd,tbgnd->bgst", rotate(q, *rotation), rotate(k, *rotation))

    torch.testing.assert_close(scores(here), scores(there), **ANGLE)


def test_rotation_keeps_lengths_and_position_zero_and_undoes_itself() -> None:
    x = heads(5)
    rotation = rope().at(torch.arange(5), torch.float64)
    turned = rotate(x, *rotation)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), **ANGLE)
    assert torch.equal(turned[0], x[0])
    back = rotate(turned, rotation.cos, -rotation.sin)
    torch.testing.assert_close(back, x, **ANGLE)


def test_only_the_chosen_share_of_a_head_rotates() -> None:
    x = heads(5)
    turned = rotate(x, *rope(rotary_percent=0.5).at(torch.arange(5), torch.float64))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_the_gradient_of_rotation_is_right_for_strided_input() -> None:
    x = heads(4).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    rotation = rope(rotary_percent=0.5).at(torch.arange(4), torch.float64)
    assert torch.autograd.gradcheck(lambda t: rotate(t, *rotation), x)


def test_positions_of_their_own_per_row_are_looked_up_per_row() -> None:
    ids = torch.tensor([[0, 1, 2, 0], [5, 6, 0, 1]])
    rows = rope().at(ids, torch.float64)
    for row in range(2):
        alone = rope().at(ids[row], torch.float64)
        assert torch.equal(rows.cos[:, row : row + 1], alone.cos)
        assert torch.equal(rows.sin[:, row : row + 1], alone.sin)


def test_far_positions_stay_apart_in_half_precision() -> None:
    cos = rope().at(torch.arange(5000), torch.bfloat16).cos
    exact = rope().at(torch.arange(5000), torch.float64).cos
    # The only loss is one rounding to bfloat16's 8 bits.
    torch.testing.assert_close(cos.double(), exact, rtol=2**-8, atol=1e-9)
    assert not torch.equal(cos[4000], cos[4001])


@pytest.mark.parametrize(("percent", "width"), [(0.1, 8), (1.0, 7)])
def test_channels_that_do_not_pair_up_are_refused(percent: float, width: int) -> None:
    config = tiny_config(
        position_embedding_type=PositionEmbedding.ROPE, kv_channels=width, rotary_percent=percent
    )
    with pytest.raises(ConfigError, match="these do not pair up"):
        RotaryAngles(config)


def test_yarn_leaves_fast_frequencies_and_divides_slow_ones_by_its_factor() -> None:
    plain, scaled = (
        rotary_frequencies(
            tiny_config(
                position_embedding_type=PositionEmbedding.ROPE,
                rope_type=kind,
                rotary_scaling_factor=8.0,
                yarn_original_max_position_embeddings=256,
                yarn_beta_fast=16.0,
            ),
            64,
            torch.device("cpu"),
        )
        for kind in RopeType
    )
    turns = plain * 256 / (2 * torch.pi)
    share = scaled / plain
    # Bounds are rounded outwards to whole pairs, of which neighbours differ by a third.
    assert torch.equal(share[turns > 16 * 1.5], torch.ones_like(share[turns > 16 * 1.5]))
    torch.testing.assert_close(
        share[turns < 1 / 1.5], torch.full_like(share[turns < 1 / 1.5], 1 / 8)
    )
    between = share[(turns < 16) & (turns > 1)]
    assert len(between) > 5
    assert bool((between.diff() < 0).all())


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((1.0, 0.0), 0.1 * math.log(8) + 1), ((0.7, 0.7), 1.0), ((0.0, 0.0), 1.0)],
)
def test_yarn_makes_rotated_queries_longer(weights: tuple[float, float], expected: float) -> None:
    angles = rope(
        rope_type=RopeType.YARN,
        rotary_scaling_factor=8.0,
        mscale=weights[0],
        mscale_all_dim=weights[1],
    )
    x = heads(5)
    turned = rotate(x, *angles.at(torch.arange(5), torch.float64))
    torch.testing.assert_close(turned.norm(dim=-1), expected * x.norm(dim=-1), **ANGLE)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    # 12 heads in the authors' code: those of 8, then every second one of 16.
    assert alibi_slopes(12) == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    )


@pytest.mark.parametrize("heads_", range(1, 70))
def test_there_is_a_falling_positive_slope_for_every_head(heads_: int) -> None:
    slopes = alibi_slopes(heads_)
    assert len(set(slopes)) == heads_
    assert all(0 < slope < 1 for slope in slopes)


def learned(*, sequence_parallel: bool = False) -> LearnedPositions:
    table = LearnedPositions(
        8, 4, init=Init("zeros"), sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    torch.nn.init.normal_(table.weight)
    return table


def test_a_part_of_the_sequence_gets_the_vectors_of_its_own_positions() -> None:
    table, ids = learned(sequence_parallel=True), torch.tensor([[0, 1, 2, 0], [5, 6, 0, 1]])
    assert is_sequence_parallel(table.weight)
    assert not is_sequence_parallel(learned().weight)
    for asked in (None, ids):
        whole = table(4, asked)
        assert torch.equal(table(4, asked, slice(0, 2)), whole[:2])
        assert torch.equal(table(4, asked, slice(2, 4)), whole[2:])


def test_a_sequence_longer_than_the_table_is_refused_with_both_numbers() -> None:
    table = learned()
    assert table(8, None).shape == (8, 1, 4)
    assert table(3, torch.zeros(2, 3, dtype=torch.int64)).shape == (3, 2, 4)
    with pytest.raises(ConfigError, match="longer than the table of learned positions") as raised:
        table(9, None)
    assert "9 tokens, --max-position-embeddings 8" in str(raised.value)
