"""pretrain(), and what pretraining gives to the training loop: data, evaluations, saves.

The loop itself is `megatron/loop/training_loop.py`, which fine-tuning calls as well. A feature that
makes `run` longer by more than a line belongs elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron import log
from megatron.arguments import ExtraArgsProvider
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpointing import (
    load_checkpoint,
    local_checkpoints,
    reserve_for_saves,
    save_checkpoint,
    save_local_checkpoint,
)
from megatron.config.run import RunConfig
from megatron.data.corpus.sources import (
    announce_doubtful_pairs,
    announce_shared_corpora,
    data_sources,
)
from megatron.data.loading.gpt_batch import truncate_batch
from megatron.engine.base import DatasetRequest, Datasets, PretrainTask, RawBatch, StepPlan
from megatron.engine.build import build_engine
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.lengths import batch_schedule
from megatron.lengths import duration as duration_of
from megatron.loop.data_feed import DataFeed
from megatron.loop.hooks import CompletedStep, SaveCheckpoints, collected_around, due
from megatron.loop.memory_marks import announce_memory
from megatron.loop.spikes import WatchLoss, with_recorded_skips
from megatron.loop.startup import agree_on_files
from megatron.loop.training_loop import TrainingLoop, training_loop
from megatron.model_build import model_build
from megatron.peers.activity import SAVE
from megatron.progress import Duration, Progress


def pretrain(
    task: PretrainTask,
    config: RunConfig | None = None,
    *,
    train_valid_test_datasets_provider: Callable[[DatasetRequest], Datasets] | None = None,
    model_provider: Callable[..., Any] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Progress:
    """Initialise, train, evaluate and save one run; the same call on every rank.

    Args:
        task: what is read, built and minimised.
        config: the run's flags, already parsed; read from the command line when not given.
        train_valid_test_datasets_provider: Megatron's name for `task.datasets`; wins over it.
        model_provider: Megatron's name for `task.layers`; wins over it.

    Returns:
        How far the run got.
    """
    if train_valid_test_datasets_provider is not None:
        task = replace(task, datasets=train_valid_test_datasets_provider)
    if model_provider is not None:
        task = replace(task, layers=model_provider)
    runtime = initialize_megatron(
        config,
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        reads=task.reads,
    )
    progress = run(task, runtime)
    shutdown_megatron()
    return progress


def run(task: PretrainTask, runtime: Runtime) -> Progress:
    """Train until a stop condition holds; the caller has already checked that it can."""
    context = runtime.context
    config = with_recorded_skips(runtime.config, context)
    runtime = replace(runtime, config=config)
    duration = duration_of(config, batch_schedule(config, context.dp.size))
    build = model_build(runtime)
    sources = data_sources(config.data)
    agree_on_files(config.checkpoint.save, sources, runtime.launch, context)
    announce_shared_corpora(config.data, sources)
    announce_doubtful_pairs(config.data)
    engine = build_engine(config, task, build, runtime.tokenizer, runtime.timers)
    local = local_checkpoints(config, context)
    progress = load_checkpoint(config, engine, runtime, sources, local)
    first = progress.iteration
    with ExitStack() as resources:
        data = resources.enter_context(closing(_data_feed(task, runtime, duration)))
        batches_of = partial(_batches_of, config, data.training(progress))
        loop = resources.enter_context(
            training_loop(
                engine,
                config,
                build,
                duration,
                progress,
                runtime.timers,
                runtime.run_name,
                runtime.activity,
            )
        )
        if config.training.eval_only:
            progress = data.validate(engine, progress, loop.step_log)
            data.test(engine, progress, loop.step_log)
            return progress
        if config.training.eval_at_start and not first:
            progress = data.validate(engine, progress, loop.step_log)
        reserve_for_saves(config, engine, loop.saves, local)
        save, save_locally = _saves(loop, runtime, sources, data, local, first)
        progress, reason = loop.train(
            progress,
            batches_of,
            (
                WatchLoss(config, runtime.recent, context, lambda: save.saved_iteration),
                CheckData(data, config.training.check_agreement_interval),
                Validate(loop, data),
                save_locally,
            ),
            save,
        )
        if local is not None:
            local.remove()
        if duration.is_done(progress) and progress.iteration > first:
            data.test(engine, progress, loop.step_log)
        announce_memory(runtime.activity, context.world)
        log.info(f"stopped: {reason}")
        return progress


@dataclass(frozen=True, slots=True)
class CheckData:
    """Check data files and drawn samples, every --check-agreement-interval."""

    data: DataFeed
    interval: int | None

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Raise DataError if a file was changed, or a rank drew other samples than planned."""
        if due(self.interval, progress):
            self.data.check_unchanged()
            self.data.agree_on_samples(progress)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether the comparison is due, whose samples are those of whole steps."""
        return due(self.interval, progress)


@dataclass(frozen=True, slots=True)
class Validate:
    """Evaluate on the validation data every --eval-interval, and after the last step."""

    loop: TrainingLoop
    data: DataFeed

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Evaluate if it is due; return the progress with its validation samples."""
        if not self.precedes_next_step(progress):
            return progress
        flags = self.loop.config.training
        with collected_around(flags.manual_gc and flags.manual_gc_eval):
            return self.data.validate(self.loop.engine, progress, self.loop.step_log)

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether an evaluation is due."""
        interval = self.loop.config.training.eval_interval
        return due(interval, progress) or self.loop.duration.is_done(progress)


def _saves(
    loop: TrainingLoop,
    runtime: Runtime,
    sources: Mapping[str, str],
    data: DataFeed,
    local: LocalCheckpoints | None,
    first: int,
) -> tuple[SaveCheckpoints, SaveCheckpoints]:
    """Return what saves to --save, and what saves on the nodes, in a run that begins at `first`."""
    flags = runtime.config.checkpoint
    save = SaveCheckpoints(
        partial(_save, loop, runtime, sources, data),
        flags.save_interval,
        also=flags.extra_save_iters,
        saved_iteration=local.persistent if local is not None and local.went_on else first,
    )
    save_locally = SaveCheckpoints(
        partial(_save_locally, local, loop, runtime, sources),
        flags.non_persistent_save_interval,
        saved_iteration=first,
    )
    return save, save_locally


def _save(
    loop: TrainingLoop,
    runtime: Runtime,
    sources: Mapping[str, str],
    data: DataFeed,
    progress: Progress,
) -> None:
    """Save a checkpoint, after checking the data that it records, and what was drawn of them."""
    data.check_unchanged()
    data.agree_on_samples(progress)
    loss = data.validation_loss(progress)
    with runtime.activity.during(SAVE):
        save_checkpoint(
            runtime.config,
            loop.engine,
            progress,
            runtime,
            sources,
            saves=loop.saves,
            validation_loss=loss,
        )


def _save_locally(
    local: LocalCheckpoints | None,
    loop: TrainingLoop,
    runtime: Runtime,
    sources: Mapping[str, str],
    progress: Progress,
) -> None:
    """Save a local checkpoint; called only where there are some."""
    assert local is not None  # noqa: S101  # invariant: they have an interval
    with runtime.activity.during(SAVE):
        save_local_checkpoint(local, loop.engine, runtime, sources, progress)


def _batches_of(
    config: RunConfig, batches: Iterator[RawBatch], plan: StepPlan, progress: Progress
) -> Iterator[RawBatch] | None:
    """Return the batches of the next step; None if --skip-train-iteration-range names it."""
    iteration = progress.iteration + 1
    skipped = next((each for each in config.training.skipped if iteration in each), None)
    if skipped is not None:
        _skip_iteration(batches, plan, iteration, skipped)
        return None
    if plan.seq_length < config.data.seq_length:  # under a curriculum
        return map(partial(truncate_batch, length=plan.seq_length), batches)
    return batches


def _skip_iteration(
    batches: Iterator[RawBatch], plan: StepPlan, iteration: int, skipped: range
) -> None:
    """Read the batches of an iteration, and train on none of them."""
    for _ in range(plan.num_microbatches):
        next(batches)
    if iteration == skipped[-1]:
        log.info(
            f"Skipped iterations {skipped[0]} to {skipped[-1]} due to "
            "--skip-train-iteration-range flag."
        )


def _data_feed(task: PretrainTask, runtime: Runtime, duration: Duration) -> DataFeed:
    return DataFeed(
        task,
        runtime.config,
        runtime.context,
        runtime.launch,
        runtime.tokenizer,
        duration,
        runtime.activity,
    )
