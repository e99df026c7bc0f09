"""Fine-tuning through an engine: epochs, a look at the validation data after each, the best kept.

Engines, schedules, reasons to stop, the line of an iteration and checkpoints are those of
pretraining; what is here is the order of examples and what is done with scores. How far a run is,
its epoch and its place in it follow from the number of the iteration.
"""

import hashlib
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache

from megatron import log
from megatron.checkpoint.load import storage
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.config.run import RunConfig
from megatron.engine.base import RawBatch, StepPlan
from megatron.engine.build import build_engine
from megatron.errors import CheckpointError
from megatron.global_vars import Runtime
from megatron.lengths import batch_schedule
from megatron.loop.anomaly import check_numbers
from megatron.loop.report import StepLog
from megatron.loop.stop import StopConditions
from megatron.model.accounting import flops_per_token
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.preflight.agreement import agree_on_data, agree_on_state
from megatron.progress import Duration, Progress
from megatron.training import due, plan_step, state_of
from tasks.finetune.examples import Question
from tasks.finetune.judging import Judged, Part, judge, spelled
from tasks.finetune.order import batches_of_epoch, num_batches, share_of_replica
from tasks.finetune.rows import Rows
from tasks.finetune.start import Kind, Start, best_to_load, last_to_save
from tasks.finetune.task import task_of


@dataclass(frozen=True)
class Outcome:
    """How a fine-tuning ended.

    Attributes:
        best: the best epoch's scores of the validation data.
        losses: mean training loss of each epoch of this process, over what it trained of it.
        stopped: why it ended before its last epoch; None when it is complete.
    """

    best: Judged
    best_epoch: int
    losses: tuple[float, ...]
    stopped: str | None = None


@dataclass
class _Epochs:
    """What is known of the epochs so far."""

    best: Judged | None = None
    best_epoch: int = 0
    losses: tuple[float, ...] = ()
    total: float = 0.0  # of the losses of the present epoch's examples
    examples: int = 0


class FineTuning:
    """A classifier on this rank, and what it begins with. All ranks use it together."""

    def __init__(
        self, config: RunConfig, runtime: Runtime, question: Question, start: Start
    ) -> None:
        self._config, self._runtime, self._question = config, runtime, question
        self._start = start
        self._context: ParallelContext = runtime.context
        self._batches = batch_schedule(config.training, self._context.dp.size)
        task = task_of(question)
        build = model_build(runtime)
        self._engine = build_engine(config, task, build, runtime.tokenizer, runtime.timers)
        if start.kind is not Kind.RESUMED:
            self._load(config)

    def judge(self, rows: Rows) -> Judged:
        """Score every example with the model as it is now."""
        size = self._config.training.micro_batch_size
        return judge(self._engine, rows, self._question, self._context, micro_batch_size=size)

    def train(self, rows: Rows, valid: Rows, parts: tuple[Part, ...], *, epochs: int) -> Outcome:
        """Train, judging after each epoch; the best so far is what --save holds.

        Args:
            parts: the files of `valid`, each of which is judged by itself too.
        """
        config, world = self._config, self._context.world
        per_epoch = num_batches(len(rows), self._batches.global_batch_size)
        duration = Duration(self._batches, train_iters=epochs * per_epoch)
        sources = {"examples to train on": _digest_of(rows)}
        agree_on_data(sources | {"examples to judge by": _digest_of(valid)}, world)
        known, progress = _Epochs(), Progress()
        if self._start.kind is Kind.RESUMED:
            known = self._best_so_far(valid, per_epoch)
            progress = self._load(config, sources)
            _check_batches(progress, self._batches.global_batch_size)
        first = saved = progress.iteration
        order = lru_cache(maxsize=1)(
            lambda epoch: batches_of_epoch(
                len(rows),
                batch_size=self._batches.global_batch_size,
                seed=config.training.seed,
                epoch=epoch,
            )
        )
        with ExitStack() as resources:
            report = resources.enter_context(self._step_log(duration, progress))
            stop = StopConditions(config.training, duration, world)
            resources.enter_context(stop.listening())
            agree_on_state(state_of(progress, self._engine), world)
            report.begin()
            while (reason := stop.reason(progress, steps_done=progress.iteration - first)) is None:
                epoch, at = divmod(progress.iteration, per_epoch)
                batch = order(epoch + 1)[at]
                plan = plan_step(config, self._batches, duration, progress)
                progress = self._step(rows, batch, plan, progress, report, known)
                paused = time.perf_counter()
                if due(config.training.check_agreement_interval, progress):
                    agree_on_state(state_of(progress, self._engine), world)
                if at + 1 == per_epoch:
                    name = f"{epoch + 1}/{epochs}"
                    self._end_of_epoch(name, valid, parts, progress, known, sources)
                    saved = self._save_last(progress, sources)
                elif due(config.checkpoint.save_interval, progress):
                    saved = self._save_last(progress, sources)
                report.paused(time.perf_counter() - paused)
            if saved != progress.iteration:
                self._save_last(progress, sources)
        done = duration.is_done(progress)
        best = known.best or self.judge(valid)
        return Outcome(best, known.best_epoch, known.losses, None if done else reason)

    def _load(self, config: RunConfig, sources: dict[str, str] | None = None) -> Progress:
        return load_checkpoint(config, self._engine, self._runtime, sources or {})

    def _best_so_far(self, valid: Rows, per_epoch: int) -> _Epochs:
        """Judge the best epoch of the folder that is gone on with again, if there is one yet."""
        config = best_to_load(self._config)
        save = config.checkpoint.save or ""
        if storage.never_held_a_checkpoint(save):
            return _Epochs()
        self._load(config)
        return _Epochs(self.judge(valid), storage.latest_iteration(save) // per_epoch)

    def _step(
        self,
        rows: Rows,
        batch: list[int],
        plan: StepPlan,
        progress: Progress,
        report: StepLog,
        known: _Epochs,
    ) -> Progress:
        """One optimizer step on the examples of `batch`."""
        micro = self._config.training.micro_batch_size
        shares = share_of_replica(
            batch,
            micro_batch_size=micro,
            replica=self._context.dp.rank,
            replicas=self._context.dp.size,
            num_microbatches=plan.num_microbatches,
        )
        raw: list[RawBatch] = [rows.take(each, size=micro) for each in shares]
        result = self._engine.train_step(iter(raw), plan)
        known.total += result.loss * len(batch)
        known.examples += len(batch)
        progress = progress.after(
            samples=plan.global_batch_size,
            tokens=plan.global_batch_size * plan.seq_length,
            skipped=result.skipped,
            nonfinite=result.skipped and not result.overflow,
        )
        report.step(progress, plan, result)
        check_numbers(result, progress, self._config.training)
        return progress

    def _end_of_epoch(
        self,
        name: str,
        valid: Rows,
        parts: tuple[Part, ...],
        progress: Progress,
        known: _Epochs,
        sources: dict[str, str],
    ) -> None:
        """Judge, say so, and keep the model if none was better."""
        known.losses += (known.total / known.examples,)
        known.total, known.examples = 0.0, 0
        judged, first = self.judge(valid), self._question.metrics[0]
        said = spelled(judged.metrics)
        log.info(f" epoch {name} | training loss: {known.losses[-1]:.4E} | {said} |")
        say_parts(judged, parts, self._question, valid, f"epoch {name}")
        if known.best is None or judged.metrics[first] > known.best.metrics[first]:
            known.best, known.best_epoch = judged, int(name.partition("/")[0])
            save_checkpoint(self._config, self._engine, progress, self._runtime, sources)

    def _save_last(self, progress: Progress, sources: dict[str, str]) -> int:
        """Keep the state to go on from, where there is a place and the optimizer is wanted."""
        flags = self._config.checkpoint
        if flags.save is not None and flags.save_optim:
            config = last_to_save(self._config)
            save_checkpoint(config, self._engine, progress, self._runtime, sources)
        return progress.iteration

    def _step_log(self, duration: Duration, progress: Progress) -> StepLog:
        config, world = self._config, self._context.world
        return StepLog(
            config.logging,
            duration,
            flops_per_token=lambda length: flops_per_token(config.model, 0, length),
            world_size=world.size,
            is_writer=world.is_last,
            purge_step=progress.iteration + 1 if progress.iteration else 0,
            losses=("loss",),
            timers=self._runtime.timers,
        )


def say_parts(
    judged: Judged, parts: tuple[Part, ...], question: Question, rows: Rows, about: str
) -> None:
    """A line for each of several files."""
    for part in parts if len(parts) > 1 else ():
        found = spelled(judged.metrics_of(part, question, rows.labels))
        count = len(part.examples)
        log.info(f" {about} | {part.name} | examples: {count} | {found or 'no labels'} |")


def _check_batches(progress: Progress, global_batch_size: int) -> None:
    """The place in an epoch is counted in batches: CheckpointError when they were of other size."""
    if progress.consumed_samples != progress.iteration * global_batch_size:
        raise CheckpointError(
            "an interrupted fine-tuning goes on with batches of the size that it began with",
            found=f"{progress.consumed_samples} samples in {progress.iteration} iterations, and "
            f"{global_batch_size} in each here",
            fix="give --global-batch-size as it was "
            f"({progress.consumed_samples / max(1, progress.iteration):g})",
        )


def _digest_of(rows: Rows) -> str:
    """What the examples are, in a form that two runs and two ranks can compare."""
    digest = hashlib.sha256()
    for tensor in (rows.text, rows.types, rows.labels):
        digest.update(tensor.numpy().tobytes())
    return f"{len(rows)} examples, sha256 {digest.hexdigest()[:16]}"
