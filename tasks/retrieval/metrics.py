"""How far up the blocks stand that are right, as pure functions of lists of marks."""

from collections.abc import Sequence

Hits = Sequence[Sequence[bool]]  # of each question: whether each block found is right, best first


def recall_at(hits: Hits, count: int) -> float:
    """Return the share of questions with a right block among the first `count`; 0 of none.

    Open-domain question answering calls this top-k accuracy (arXiv 2004.04906, section 5.1).
    """
    if not hits:
        return 0.0
    return sum(any(found[:count]) for found in hits) / len(hits)


def mean_reciprocal_rank(hits: Hits) -> float:
    """Return the mean over questions of 1 / the rank of the first right block, from 1.

    A question without one counts as 0, and so does the mean over none.
    """
    if not hits:
        return 0.0
    return sum(_reciprocal_rank(found) for found in hits) / len(hits)


def _reciprocal_rank(found: Sequence[bool]) -> float:
    return next((1 / rank for rank, is_right in enumerate(found, 1) if is_right), 0.0)
