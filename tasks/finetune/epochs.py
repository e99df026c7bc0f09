"""What fine-tuning gives to the training loop: the examples of each step, scores after each epoch.

How far a run is, its epoch and its place in it follow from the number of the iteration.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron import log
from megatron.config.training import TrainingConfig
from megatron.engine.base import RawBatch, StepPlan
from megatron.loop.hooks import CompletedStep, due
from megatron.mpu.context import Group
from megatron.progress import Progress
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.judging import EvaluationFile, EvaluationResult, format_metrics, log_parts
from tasks.finetune.order import batches_of_epoch, num_batches, share_of_replica
from tasks.finetune.rows import Rows


class EpochBatches:
    """The examples of every step, reordered in each epoch; a replica reads its share."""

    def __init__(
        self, rows: Rows, training: TrainingConfig, replicas: Group, *, global_batch_size: int
    ) -> None:
        self._rows, self._replicas = rows, replicas
        self._micro_batch_size = training.micro_batch_size
        self.per_epoch = num_batches(len(rows), global_batch_size)

        @lru_cache(maxsize=1)
        def order_of(epoch: int) -> list[list[int]]:
            return batches_of_epoch(
                len(rows), batch_size=global_batch_size, seed=training.seed, epoch=epoch
            )

        self._order_of = order_of

    def examples_of(self, iteration: int) -> list[int]:
        """Return the examples of the whole global batch of an iteration, counted from 0."""
        epoch, at = divmod(iteration, self.per_epoch)
        return self._order_of(epoch + 1)[at]

    def __call__(self, plan: StepPlan, progress: Progress) -> Iterator[RawBatch]:
        """Yield the micro-batches of this replica for the step after `progress`."""
        shares = share_of_replica(
            self.examples_of(progress.iteration),
            micro_batch_size=self._micro_batch_size,
            replica=self._replicas.rank,
            replicas=self._replicas.size,
            num_microbatches=plan.num_microbatches,
        )
        for share in shares:
            yield self._rows.take(share, size=self._micro_batch_size)


@dataclass
class JudgeEpochs:
    """A hook that evaluates the model after each epoch, and saves it if it is the best so far.

    Attributes:
        judge: scores the validation examples with the model as it is.
        save_best: saves the model as the best one so far.
        parts: the files of the validation examples `valid`, each of which has a line of its own.
        best: scores of the best epoch so far; None before the first one.
        losses: mean training loss of each epoch of this process, over what it trained of it.
    """

    question: ClassificationQuestion
    valid: Rows
    parts: tuple[EvaluationFile, ...]
    batches: EpochBatches
    num_epochs: int
    judge: Callable[[Rows], EvaluationResult]
    save_best: Callable[[Progress], None]
    best: EvaluationResult | None = None
    best_epoch: int = 0
    losses: tuple[float, ...] = ()
    _loss_sum: float = 0.0  # over the examples of the present epoch
    _num_examples: int = 0

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Add the step's loss to that of its epoch; evaluate if the epoch is over."""
        examples = len(self.batches.examples_of(progress.iteration - 1))
        self._loss_sum += step.result.loss * examples
        self._num_examples += examples
        if self.precedes_next_step(progress):
            self._end_epoch(progress.iteration // self.batches.per_epoch, progress)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether an epoch is over."""
        return due(self.batches.per_epoch, progress)

    def _end_epoch(self, epoch: int, progress: Progress) -> None:
        self.losses += (self._loss_sum / self._num_examples,)
        self._loss_sum, self._num_examples = 0.0, 0
        judged, metric = self.judge(self.valid), self.question.metrics[0]
        name = f"epoch {epoch}/{self.num_epochs}"
        log.info(
            f" {name} | training loss: {self.losses[-1]:.4E} | {format_metrics(judged.metrics)} |"
        )
        log_parts(judged, self.parts, self.question, self.valid, name)
        if self.best is None or judged.metrics[metric] > self.best.metrics[metric]:
            self.best, self.best_epoch = judged, epoch
            self.save_best(progress)
