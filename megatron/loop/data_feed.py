"""Which samples come next: the datasets of a run, and iterators over them that survive a resume.

Where a run stands is a count of samples and nothing else. Of the ranks that take the same samples
(tp x cp) only the first reads, and sends what it read.
"""

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from megatron.config.data import DataLoaderKind
from megatron.config.run import RunConfig
from megatron.data.loading.loaders import build_data_loader
from megatron.data.loading.worker_budget import WorkerLoad, announce_worker_budget
from megatron.engine.base import DatasetRequest, Engine, PretrainTask, RawBatch
from megatron.errors import DataError
from megatron.launch import Launch
from megatron.lengths import num_samples
from megatron.loop.drawn_samples import DrawnSamples
from megatron.loop.evaluate import evaluate
from megatron.loop.report import StepLog
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.data import broadcast_batch
from megatron.mpu.progress_barrier import ProgressBarrier
from megatron.peers.activity import DATA, EVALUATION, Activity
from megatron.progress import Duration, Progress
from megatron.tokenizer.tokenizer import Tokenizer


class DataFeed:
    """The datasets of a run, and the iterators over them that survive a resume."""

    def __init__(
        self,
        task: PretrainTask,
        config: RunConfig,
        context: ParallelContext,
        launch: Launch,
        tokenizer: Tokenizer,
        duration: Duration,
        activity: Activity,
    ) -> None:
        self._activity = activity
        batches = duration.batch_schedule
        self._config, self._context, self._batches = config, context, batches
        self._total_samples = duration.total_samples
        patience_s = 60 * config.launch.distributed_timeout_minutes
        barrier = ProgressBarrier(context.world, patience_s=patience_s)
        self._datasets = task.datasets(
            DatasetRequest(
                data=config.data,
                tokenizer=tokenizer,
                num_samples=num_samples(config.training, duration, batches.global_batch_size),
                min_samples=batches.global_batch_size,
                seed=config.training.seed,
                is_builder=launch.local_rank == 0,
                wait=barrier.wait,
                report_progress=barrier.report_progress,
            )
        )
        announce_worker_budget(
            WorkerLoad(
                num_workers=config.data.num_workers,
                loaders=sum(len(_by_name(named, "")) for named in self._datasets),
                readers=max(1, launch.local_world_size // context.tp_cp.size),
                batch_bytes=config.training.micro_batch_size * (config.data.seq_length + 1) * 8,
            )
        )
        self._valid: dict[str, Iterator[RawBatch]] | None = None
        self._validated: tuple[int, float] | None = None  # at which iteration, with what loss
        self._readers: list[Generator[RawBatch, None, None]] = []
        self._drawn: DrawnSamples | None = None  # since ranks compared it last

    def close(self) -> None:
        """Stop the processes that read ahead now, rather than at garbage collection."""
        while self._readers:
            self._readers.pop().close()

    def training(self, progress: Progress) -> Iterator[RawBatch]:
        """Return micro-batches of this replica from the run's progress on.

        Raises:
            DataError: the samples are read in order, once, and there are fewer than the run takes.
        """
        available, needed = len(self._datasets.train), self._total_samples
        if self._config.data.dataloader_type is DataLoaderKind.SINGLE and available < needed:
            raise DataError(
                "the training data holds fewer samples than the run takes",
                found=f"{available} samples, read once in order; the run takes {needed}",
                fix="train on fewer samples, give more data, or use --dataloader-type cyclic",
            )
        self._drawn = DrawnSamples(
            self._context,
            micro_batch_size=self._config.training.micro_batch_size,
            position=progress.consumed_samples,
        )
        return self._batches_of(self._datasets.train, progress.consumed_samples, drawn=self._drawn)

    def agree_on_samples(self, progress: Progress) -> None:
        """Raise DataError on every rank where training did not draw what was planned."""
        if self._drawn is not None:
            self._drawn.agree(progress.consumed_samples)

    def check_unchanged(self) -> None:
        """Raise DataError if a file of any dataset was replaced, truncated or appended to."""
        for named in self._datasets:
            for dataset in _by_name(named, "").values():
                dataset.check_unchanged()

    def validate(self, engine: Engine, progress: Progress, report: StepLog) -> Progress:
        """Evaluate on each group of validation data; the next call continues with later samples.

        Groups advance alike, so one counter is the position of all of them.
        """
        groups = _by_name(self._datasets.valid, "validation")
        if not groups or not self._config.training.eval_iters:
            return progress
        if self._valid is None:
            # Over and over: a run that is prolonged, or evaluates more often than when it began,
            # needs more samples than were planned, and must not end for want of them.
            self._valid = {
                name: self._batches_of(dataset, progress.consumed_valid_samples, over_and_over=True)
                for name, dataset in groups.items()
            }
        means = [
            self._evaluate(name, engine, batches, progress, report)
            for name, batches in self._valid.items()
        ]
        self._validated = (progress.iteration, means[0])
        samples = self._config.training.eval_iters * self._batches.global_batch_size
        return progress.after_evaluation(samples=samples)

    def validation_loss(self, progress: Progress) -> float | None:
        """Return the loss of the present weights on the first group; None if not evaluated."""
        if self._validated is None or self._validated[0] != progress.iteration:
            return None
        return self._validated[1] if math.isfinite(self._validated[1]) else None

    def test(self, engine: Engine, progress: Progress, report: StepLog) -> None:
        """Evaluate once on each group of test data."""
        if not self._config.training.eval_iters:
            return
        for name, dataset in _by_name(self._datasets.test, "test").items():
            self._evaluate(name, engine, self._batches_of(dataset, 0), progress, report)

    def _evaluate(
        self,
        name: str,
        engine: Engine,
        batches: Iterator[RawBatch],
        progress: Progress,
        report: StepLog,
    ) -> float:
        iterations, size = self._config.training.eval_iters, self._batches.global_batch_size
        microbatches = size // (self._config.training.micro_batch_size * self._context.dp.size)
        with self._activity.during(EVALUATION):
            result = evaluate(engine, batches, iterations=iterations, microbatches=microbatches)
        report.evaluation(name, result, progress)
        return result.mean

    def _batches_of(
        self,
        dataset: Any,
        consumed: int,
        *,
        over_and_over: bool = False,
        drawn: DrawnSamples | None = None,
    ) -> Iterator[RawBatch]:
        """Return micro-batches over the ranks that take the same; only the first of them reads.

        Args:
            drawn: where they are recorded.
        """
        own_batches = None
        if self._context.tp_cp.is_first:
            own_batches = self._epochs(dataset, consumed, over_and_over, drawn)
            self._readers.append(own_batches)
        return _shared(own_batches, self._context.host_tp_cp, self._activity, drawn)

    def _epochs(
        self, dataset: Any, consumed: int, over_and_over: bool, drawn: DrawnSamples | None
    ) -> Generator[RawBatch, None, None]:
        """Yield epoch after epoch in cyclic order; the single order ends with its index."""
        context, training, data = self._context, self._config.training, self._config.data
        step = training.micro_batch_size * context.dp.size
        single = data.dataloader_type is DataLoaderKind.SINGLE
        # Whole global batches, so that every layout starts again at the same sample.
        turn = len(dataset) - len(dataset) % self._batches.global_batch_size
        while True:
            if single and over_and_over:
                consumed %= turn
            loader = build_data_loader(
                dataset,
                consumed_samples=consumed,
                micro_batch_size=training.micro_batch_size,
                data_parallel_rank=context.dp.rank,
                data_parallel_size=context.dp.size,
                num_workers=data.num_workers,
                kind=data.dataloader_type.value,
                seed=training.seed,
            )
            for batch in loader:
                consumed += step
                if drawn is not None:
                    drawn.add_ids(loader.ids, loader.planned_ids)
                yield batch
                if single and over_and_over and consumed == turn:
                    break
            if single and not over_and_over:
                return


def _by_name(datasets: Any, name: str) -> Mapping[str, Any]:
    """Return datasets by the name of their group; a single one has the name of its use."""
    if datasets is None:
        return {}
    return datasets if isinstance(datasets, Mapping) else {name: datasets}


def _shared(
    batches: Iterator[RawBatch] | None,
    same_samples: Group,
    activity: Activity,
    drawn: DrawnSamples | None,
) -> Iterator[RawBatch]:
    while True:
        batch = None
        if batches is not None:
            with activity.during(DATA):
                batch = next(batches, None)
            if batch is None:
                raise DataError(
                    "the data ended before the run did",
                    found="an exhausted data loader",
                    fix="this is a mistake in counting samples; please report it with your flags",
                )
        received = broadcast_batch(None if batch is None else dict(batch), same_samples)
        if drawn is not None:
            drawn.add_batch(received)
        yield received
