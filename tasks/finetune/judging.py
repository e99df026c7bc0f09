"""How good a classifier is: every example scored once on any grid, and compared with its label.

Of several files of validation data each has metrics of its own beside those of all together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import log
from megatron.engine.base import Engine
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.metrics import METRICS
from tasks.finetune.order import batches_of_epoch, share_of_replica
from tasks.finetune.rows import UNKNOWN, Rows
from tasks.finetune.task import scores_of


class EvaluationFile(NamedTuple):
    """The examples of one file or folder, as a range of all examples."""

    name: str
    examples: range


class EvaluationResult(NamedTuple):
    """Scores [n, classes or rows or 1] of all examples, and their metrics."""

    scores: Tensor
    metrics: Mapping[str, float]  # of all; empty where labels are not known

    def decisions(self, question: ClassificationQuestion) -> list[float]:
        """Return the class, the row or the grade of each example."""
        return decisions_of(question, self.scores)

    def metrics_of(
        self, part: EvaluationFile, question: ClassificationQuestion, labels: Tensor
    ) -> dict[str, float]:
        """Return the metrics of one file's examples."""
        which = slice(part.examples.start, part.examples.stop)
        return metrics_of(question, decisions_of(question, self.scores[which]), labels[which])


def evaluate_examples(
    engine: Engine,
    rows: Rows,
    question: ClassificationQuestion,
    context: ParallelContext,
    *,
    micro_batch_size: int,
) -> EvaluationResult:
    """Score every example once, equally on all ranks, and compare with known labels."""
    size = micro_batch_size * context.dp.size
    order = batches_of_epoch(len(rows), batch_size=size, seed=0, epoch=None)
    own_batches = [
        share_of_replica(
            batch,
            micro_batch_size=micro_batch_size,
            replica=context.dp.rank,
            replicas=context.dp.size,
            num_microbatches=1,
        )[0]
        for batch in order
    ]
    raw = (rows.take(each, size=micro_batch_size) for each in own_batches)
    found = engine.measure(raw, len(own_batches), scores_of)
    own_scores: dict[int, list[float]] = {}
    if found and context.tp.is_first:
        for which, (scores, _) in zip(own_batches, found, strict=True):
            own_scores |= dict(zip(which, scores.view(micro_batch_size, -1).tolist()))
    everyone: dict[int, list[float]] = {}
    for part in all_gather_object(own_scores, context.world):
        assert not everyone.keys() & part.keys()  # noqa: S101  # invariant: replicas share out
        everyone |= part
    assert len(everyone) == len(rows)  # noqa: S101  # invariant: each example is in one share
    scores = torch.tensor([everyone[at] for at in range(len(rows))], dtype=torch.float64)
    return EvaluationResult(
        scores, metrics_of(question, decisions_of(question, scores), rows.labels)
    )


def decisions_of(question: ClassificationQuestion, scores: Tensor) -> list[float]:
    """Return the class, the row or the grade of scores [n, k]."""
    found: list[float] = (
        scores.view(-1).tolist() if question.is_grade else scores.argmax(-1).tolist()
    )
    return found


def metrics_of(
    question: ClassificationQuestion, decisions: Sequence[float], labels: Tensor
) -> dict[str, float]:
    """Return the question's metrics over the examples with labels; empty without any."""
    has_label = (labels != UNKNOWN).tolist()
    true = [label for label, is_labelled in zip(labels.tolist(), has_label) if is_labelled]
    decided = [decision for decision, is_labelled in zip(decisions, has_label) if is_labelled]
    return {name: METRICS[name](true, decided) for name in question.metrics} if true else {}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as text for a line of the log."""
    return " | ".join(f"{name}: {value:.4f}" for name, value in metrics.items())


def log_parts(
    judged: EvaluationResult,
    parts: tuple[EvaluationFile, ...],
    question: ClassificationQuestion,
    rows: Rows,
    about: str,
) -> None:
    """Log the metrics of each file, if there are several."""
    for part in parts if len(parts) > 1 else ():
        metrics = format_metrics(judged.metrics_of(part, question, rows.labels))
        count = len(part.examples)
        log.info(f" {about} | {part.name} | examples: {count} | {metrics or 'no labels'} |")
