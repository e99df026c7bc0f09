"""Retrieval metrics against their definitions, and what follows from them."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.retrieval.metrics import mean_reciprocal_rank, recall_at
from tests.support.examples import examples

HITS = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


@given(hits=HITS, count=st.integers(0, 7))
@examples(80)
def test_recall_counts_questions_with_a_right_block_so_far_up(
    hits: list[list[bool]], count: int
) -> None:
    right = [at for at, found in enumerate(hits) if True in found[:count]]
    assert recall_at(hits, count) == (len(right) / len(hits) if hits else 0.0)
    assert recall_at(hits, count) <= recall_at(hits, count + 1)


@given(hits=HITS)
@examples(80)
def test_the_reciprocal_rank_lies_between_the_recalls_at_1_and_at_all(
    hits: list[list[bool]],
) -> None:
    mean = mean_reciprocal_rank(hits)
    assert recall_at(hits, 1) - 1e-12 <= mean <= recall_at(hits, 6) + 1e-12
    if hits:
        ranks = [found.index(True) + 1 for found in hits if True in found]
        assert abs(mean - sum(1 / rank for rank in ranks) / len(hits)) < 1e-12


def test_only_the_first_right_block_counts() -> None:
    assert mean_reciprocal_rank([[False, True, True], [True], []]) == (0.5 + 1 + 0) / 3
