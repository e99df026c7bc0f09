"""Losses that balance experts against their formulas, and a choice that is balanced."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.experts import LoadBalancing
from megatron.model.experts.balance import BusyExperts, balance_loss, sinkhorn, z_loss
from megatron.model.experts.router import counts_of
from megatron.mpu.context import ParallelContext
from tests.support.examples import examples
from tests.support.experts import balance_by_the_paper

ALONE = ParallelContext.single().dp


def some_scores(length: int = 6, batch: int = 3, experts: int = 5, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, experts, generator=generator, dtype=torch.float64)


def test_the_balance_is_that_of_the_paper() -> None:
    scores = some_scores()
    chosen = scores.topk(2, dim=-1).indices
    found = balance_loss(scores, counts_of(chosen, 5).double(), 6, 2)
    torch.testing.assert_close(found, balance_by_the_paper(scores, chosen), rtol=1e-12, atol=0)


def test_the_balance_is_one_where_experts_are_alike_and_more_where_one_takes_all() -> None:
    alike = torch.zeros(4, 1, 4, dtype=torch.float64)
    assert float(balance_loss(alike, torch.full((1, 4), 2.0), 4, 2)) == pytest.approx(1.0)
    alone = alike.clone()
    alone[..., 0] = 50.0
    busy = torch.tensor([[4.0, 0, 0, 0]])
    assert float(balance_loss(alone, busy, 4, 1)) == pytest.approx(4.0)


def test_the_z_loss_is_the_mean_square_of_log_sum_exp() -> None:
    scores = torch.zeros(4, 2, 8, dtype=torch.float64)
    assert float(z_loss(scores, 4)) == pytest.approx(2 * math.log(8) ** 2)


def test_a_loss_counts_in_its_sequence_its_micro_batch_or_all_so_far() -> None:
    first, second = torch.tensor([[4.0, 0.0], [1.0, 3.0]]), torch.tensor([[0.0, 4.0]])
    for kind, expected in (
        (LoadBalancing.SEQ_AUX_LOSS, ([[4.0, 0.0], [1.0, 3.0]], [[0.0, 4.0]])),
        (LoadBalancing.AUX_LOSS, ([[2.5, 1.5]] * 2, [[0.0, 4.0]])),
        (LoadBalancing.GLOBAL_AUX_LOSS, ([[2.5, 1.5]] * 2, [[5 / 3, 7 / 3]])),
    ):
        busy = BusyExperts(kind, ALONE)
        for counts, means in zip((first, second), expected):
            torch.testing.assert_close(busy.of(counts), torch.tensor(means))
        busy.forget()
        torch.testing.assert_close(busy.of(second), second)


@examples(40)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(2, 8),
    spread=st.floats(0.0, 3.0),
    shift=st.floats(-1000.0, 1000.0),
    seed=st.integers(0, 1000),
)
def test_sinkhorn_gives_tokens_and_experts_equal_sums(
    tokens: int, experts: int, spread: float, shift: float, seed: int
) -> None:
    scores = some_scores(1, tokens, experts, seed)[0] * spread
    found = sinkhorn(scores + shift)
    each = torch.full((tokens,), 1.0 / tokens, dtype=torch.float64)
    # Columns are scaled last; rows are as far off as the last factors moved.
    torch.testing.assert_close(found.sum(0), found.new_full((experts,), 1 / experts))
    assert float((found.sum(1) * tokens - each * tokens).abs().mean()) < 0.05
    # Scaled rows and columns: every 2 x 2 minor keeps its ratio.
    logs = found.log() - scores
    torch.testing.assert_close(
        logs - logs[:1] - logs[:, :1] + logs[:1, :1], torch.zeros_like(logs), rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("odd", [float("nan"), -2000.0])
def test_sinkhorn_ends_whatever_the_scores_are(odd: float) -> None:
    scores = some_scores(1, 8, 3)[0].float()
    scores[:, 2] = odd
    assert bool(sinkhorn(scores)[:, :2].isfinite().all()) is not math.isnan(odd)


def test_a_choice_by_sinkhorn_is_better_balanced_than_one_by_scores() -> None:
    scores = some_scores(1, 64, 4)[0] + torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    plain, balanced = (
        torch.bincount(one.argmax(dim=1), minlength=4).max() for one in (scores, sinkhorn(scores))
    )
    assert plain > 40
    assert balanced < 24
