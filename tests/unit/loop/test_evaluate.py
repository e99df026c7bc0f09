"""An evaluation is one sum over all of its micro-batches."""

from collections.abc import Iterator
from typing import Any

import pytest

from megatron.engine.base import EvaluationSum
from megatron.errors import DataError
from megatron.loop.evaluate import evaluate


class CountingEngine:
    """Counts ten tokens of loss 2 in every micro-batch, or none."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def evaluate(self, batches: Iterator[Any], num_microbatches: int) -> EvaluationSum:
        taken = [next(batches) for _ in range(num_microbatches)]
        return EvaluationSum(2.0 * self.tokens * len(taken), self.tokens * len(taken))


def test_it_takes_every_micro_batch_of_every_iteration() -> None:
    batches = iter(range(100))
    result = evaluate(CountingEngine(10), batches, iterations=3, microbatches=4)  # type: ignore[arg-type]
    assert result == EvaluationSum(240.0, 120)
    assert result.mean == 2.0
    assert next(batches) == 12, "the iterator is not rewound"


def test_an_evaluation_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="an evaluation counted no token at all") as caught:
        evaluate(CountingEngine(0), iter(range(9)), iterations=3, microbatches=1)  # type: ignore[arg-type]
    assert "3 global batches" in str(caught.value)
