"""Every example is judged once, in its place, and files are judged by themselves."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.engine.base import Measure, RawBatch
from megatron.mpu.context import ParallelContext
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.judging import (
    EvaluationFile,
    EvaluationResult,
    decisions_of,
    evaluate_examples,
    format_metrics,
    metrics_of,
)
from tasks.finetune.rows import UNKNOWN, Rows

QUESTION = ClassificationQuestion(("no", "yes"))
GRADES = ClassificationQuestion(metrics=("pearson", "spearman"))


def rows_of(count: int) -> Rows:
    """Rows of one token that is their number; every third is labelled "yes"."""
    text = torch.arange(count).view(count, 1, 1)
    labels = (torch.arange(count) % 3 == 0).double()
    uids = tuple(map(str, range(count)))
    return Rows(text, text * 0, text * 0 + 1, labels, uids, 0)


class Fake:
    """An engine whose scores of an example are its number and 2.5, and which counts batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def measure(self, batches: Iterator[RawBatch], count: int, measure: Measure) -> list[Any]:
        found = []
        for _ in range(count):
            text = next(batches)["text"].flatten().float()
            self.sizes.append(len(text))
            scores = torch.stack([text, torch.full_like(text, 2.5)], 1)
            found.append(torch.stack(measure((scores,), ())))
        assert next(batches, None) is None, "every batch was asked for"
        return found


@pytest.mark.parametrize("size", [1, 2, 4, 7, 50])
def test_each_example_is_scored_once_whatever_the_batch(size: int) -> None:
    engine: Any = Fake()
    found = evaluate_examples(
        engine, rows_of(7), QUESTION, ParallelContext.single(), micro_batch_size=size
    )
    assert found.scores.tolist() == [[float(at), 2.5] for at in range(7)]
    assert set(engine.sizes) == {size}  # the last batch is filled up
    # "yes" (2.5) of 0, 1 and 2, where 0, 3 and 6 are right.
    assert found.decisions(QUESTION) == [1, 1, 1, 0, 0, 0, 0]
    assert found.metrics == {"accuracy": pytest.approx(3 / 7)}


def test_files_have_metrics_of_their_own() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    labels = torch.tensor([0.0, 1.0, 0.0, UNKNOWN])
    judged = EvaluationResult(scores, metrics_of(QUESTION, decisions_of(QUESTION, scores), labels))
    assert judged.metrics == {"accuracy": pytest.approx(2 / 3)}  # of those that are known
    parts = [
        EvaluationFile("a", range(2)),
        EvaluationFile("b", range(2, 4)),
        EvaluationFile("c", range(3, 4)),
    ]
    found = [judged.metrics_of(part, QUESTION, labels) for part in parts]
    assert found == [{"accuracy": 1.0}, {"accuracy": 0.0}, {}]


def test_grades_are_scores_themselves() -> None:
    scores = torch.tensor([[1.0], [2.0], [4.0]])
    assert decisions_of(GRADES, scores) == [1.0, 2.0, 4.0]
    found = metrics_of(GRADES, [1.0, 2.0, 4.0], torch.tensor([0.0, 1.0, 3.0]))
    assert found == {"pearson": pytest.approx(1.0), "spearman": pytest.approx(1.0)}
    assert format_metrics({"pearson": 0.5, "spearman": 1.0}) == "pearson: 0.5000 | spearman: 1.0000"


def test_decisions_and_labels_have_names() -> None:
    assert QUESTION.answers == ("no", "yes")
    assert ClassificationQuestion(num_choices=4).answers == ("A", "B", "C", "D")
    assert GRADES.answers == ()
    assert [
        QUESTION.spelled(1.0),
        ClassificationQuestion(num_choices=4).spelled(2),
        GRADES.spelled(2.5),
    ] == [
        "yes",
        "C",
        "2.5",
    ]
