"""Losses on validation and test data, as sums over counted tokens of all replicas.

The validation iterator goes on where the last evaluation ended, as in Megatron, so each evaluation
sees other samples; the position is part of the progress and so survives a resume.
"""

from collections.abc import Iterator

from megatron.engine.base import Engine, EvaluationSum, RawBatch
from megatron.errors import DataError


def evaluate(
    engine: Engine, batches: Iterator[RawBatch], *, iterations: int, microbatches: int
) -> EvaluationSum:
    """Return the mean loss over `iterations` global batches of `microbatches` micro-batches.

    Raises:
        DataError: if not one token was counted.
    """
    result = engine.evaluate(batches, iterations * microbatches)
    if result.tokens == 0:
        raise DataError(
            "an evaluation counted no token at all",
            found=f"{iterations} global batches with every loss mask zero",
            fix="look at --eod-mask-loss and at the evaluation data",
        )
    return result
