"""The loss of a retriever beside a plain cross entropy, and where the right block stands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.models.retrieval import RetrievalConfig
from megatron.model.retrieval.loss import (
    NOTHING,
    BlockScores,
    accuracy_among,
    better_blocks,
    biencoder_loss,
    retrieval_scores,
    score_divisor,
)
from megatron.model.specs import Carry
from tests.support.examples import examples
from tests.support.models import tiny_build


def vectors(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator, dtype=torch.float64)


def compared(questions: torch.Tensor, blocks: torch.Tensor, divisor: float = 1.0) -> Carry:
    return BlockScores(tiny_build(), divisor=divisor)((questions, blocks))


@given(rows=st.integers(1, 5), each=st.integers(1, 3), seed=st.integers(0, 99))
@examples(40)
def test_the_loss_is_minus_the_log_share_of_the_right_block(
    rows: int, each: int, seed: int
) -> None:
    questions, blocks = vectors(rows, seed), vectors(rows * each, seed + 1)
    loss = biencoder_loss(compared(questions, blocks, 2.0))
    expected = 0.0
    for row in range(rows):
        shares = torch.softmax(blocks @ questions[row] / 2.0, 0)
        expected -= float(torch.log(shares[row * each]))
    assert float(loss.total) == pytest.approx(expected, rel=1e-12)
    assert (loss.total.shape, float(loss.count)) == (torch.Size([]), rows)


def test_accuracies_are_of_the_blocks_that_come_first() -> None:
    questions, blocks = vectors(6, 3), vectors(6, 4)
    carry = compared(questions, blocks)
    first = int(((questions @ blocks.t()).argmax(1) == torch.arange(6)).sum())
    top1, top3, top6 = (accuracy_among(count, carry, ()) for count in (1, 3, 6))
    assert (float(top1.total), float(top6.total)) == (first, 6.0)
    assert first <= float(top3.total) <= 6
    assert {float(one.count) for one in (top1, top3, top6)} == {6.0}


def test_rows_without_a_class_token_count_for_nothing() -> None:
    scores, right = compared(vectors(3, 3), vectors(3, 4))
    right = torch.tensor([NOTHING, 1, NOTHING])
    loss, expected = biencoder_loss((scores, right)), biencoder_loss((scores[1:2], right[1:2]))
    assert (float(loss.total), float(loss.count)) == (float(expected.total), 1.0)
    assert float(accuracy_among(3, (scores, right), ()).count) == 1.0


@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=4),
    right=st.integers(0, 3),
)
@examples(60)
def test_the_place_of_the_right_block_is_that_of_a_stable_sort(
    scores: list[list[int]], right: int
) -> None:
    wanted = torch.full((len(scores),), right)
    found = better_blocks(torch.tensor(scores, dtype=torch.float32), wanted)
    for row, place in zip(scores, found.tolist()):
        order = sorted(range(4), key=lambda at: -row[at])
        assert order.index(right) == place


def test_scores_are_in_fp32_or_wider() -> None:
    questions, blocks = vectors(2, 1).bfloat16(), vectors(3, 2).bfloat16()
    assert retrieval_scores(questions, blocks).dtype == torch.float32
    assert retrieval_scores(vectors(2, 1), vectors(3, 2)).dtype == torch.float64


def test_scores_are_divided_only_where_that_is_asked_for() -> None:
    assert score_divisor(RetrievalConfig(), 64) == 1.0
    assert score_divisor(RetrievalConfig(retriever_score_scaling=True), 64) == 8.0
