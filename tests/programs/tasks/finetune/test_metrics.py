"""The metrics by hand, and where they are not defined."""

import math

import pytest

from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.metrics import METRICS


def test_the_metrics_are_those_of_their_names() -> None:
    true, decided = [1, 0, 1, 1], [1, 0, 0, 1]
    assert METRICS["accuracy"](true, decided) == 0.75
    assert METRICS["f1"](true, decided) == pytest.approx(2 * 1.0 * (2 / 3) / (1 + 2 / 3))
    assert METRICS["matthews"](true, decided) == pytest.approx(2 / math.sqrt(3 * 2 * 1 * 2))
    assert METRICS["pearson"]([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert METRICS["spearman"]([1, 2, 3], [1, 4, 2]) == pytest.approx(0.5)


@pytest.mark.filterwarnings("ignore")
def test_a_correlation_with_a_constant_is_nothing() -> None:
    assert METRICS["pearson"]([1, 2, 3], [5, 5, 5]) == 0.0
    assert METRICS["spearman"]([1, 2, 3], [5, 5, 5]) == 0.0


def test_a_question_knows_how_many_scores_a_row_has() -> None:
    assert (
        ClassificationQuestion(("a", "b", "c")).num_scores,
        ClassificationQuestion(num_choices=4).num_scores,
    ) == (3, 1)
    assert [
        q.is_grade
        for q in (
            ClassificationQuestion(),
            ClassificationQuestion(("a", "b")),
            ClassificationQuestion(num_choices=4),
        )
    ] == [
        True,
        False,
        False,
    ]
