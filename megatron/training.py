"""pretrain() and the one training loop: everything else a run does is a call out of here.

The loop decides numbers and the engine obeys. If a feature cannot be added without growing `run`
by more than a line, the feature is in the wrong place.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from megatron import device, log
from megatron.arguments import ExtraArgsProvider
from megatron.checkpoint.folder.shared_view import refuse_separate_disks
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpointing import load_checkpoint, reserve_for_saves, save_checkpoint
from megatron.config.curriculum import Curriculum
from megatron.config.deepspeed.plan import deepspeed_plan, recorded_json
from megatron.config.run import RunConfig
from megatron.data.corpus.sources import announce_shared_corpora, data_sources
from megatron.data.loading.gpt_batch import shortened
from megatron.engine.base import DatasetRequest, Datasets, Engine, PretrainTask, RawBatch, StepPlan
from megatron.engine.build import build_engine
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.lengths import batch_schedule, token_count
from megatron.lengths import curriculum as curriculum_of
from megatron.lengths import duration as duration_of
from megatron.loop.anomaly import check_numbers
from megatron.loop.data_feed import DataFeed
from megatron.loop.report import StepLog
from megatron.loop.stop import StopConditions
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.model.specs import ModelBuild
from megatron.model_build import model_build
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.preflight.agreement import agree_on_data, agree_on_state
from megatron.progress import BatchSchedule, Duration, Progress


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
    """Train until something says stop; the caller has already checked that it can work."""
    config, context = runtime.config, runtime.context
    batches = batch_schedule(config.training, context.dp.size)
    duration = duration_of(config, batches)
    curriculum = curriculum_of(config)
    build = model_build(runtime)
    sources = _agree_on_files(config, runtime)
    with ExitStack() as resources:
        engine = build_engine(config, task, build, runtime.tokenizer, runtime.timers)
        progress = load_checkpoint(config, engine, runtime, sources)
        data = resources.enter_context(closing(_data_feed(task, runtime, duration)))
        training_batches = data.training(progress)
        report = resources.enter_context(_step_log(task, runtime, build, duration, progress))
        stop = StopConditions(config.training, duration, context.world)
        resources.enter_context(stop.listening())
        saves = resources.enter_context(BackgroundSaves(context))
        agree_on_state(state_of(progress, engine), context.world)
        _announce(task, runtime, build, engine, duration, progress)
        first = progress.iteration
        save = partial(_save, engine, runtime, sources, saves, data)
        if config.training.eval_only:
            progress = data.validate(engine, progress, report)
            data.test(engine, progress, report)
            return progress
        if config.training.eval_at_start and not first:
            progress = data.validate(engine, progress, report)
        reserve_for_saves(config, engine, saves)
        report.begin()
        while (reason := stop.reason(progress, steps_done=progress.iteration - first)) is None:
            saves.poll()
            plan = plan_step(config, batches, duration, progress, curriculum)
            if (skipped := _range_of(progress.iteration + 1, config.training.skipped)) is not None:
                progress = _pass_over(training_batches, plan, progress, skipped)
                continue
            cut = map(partial(shortened, length=plan.seq_length), training_batches)
            result = engine.train_step(cut if curriculum else training_batches, plan)
            progress = progress.after(
                samples=plan.global_batch_size,
                tokens=plan.global_batch_size * plan.seq_length,
                skipped=result.skipped,
                nonfinite=result.skipped and not result.overflow,
            )
            report.step(progress, plan, result, **_norms(config, engine))
            check_numbers(result, progress, config.training)
            paused = time.perf_counter()
            if due(config.training.check_agreement_interval, progress):
                agree_on_state(state_of(progress, engine), context.world)
                data.check_unchanged()
            if due(config.training.eval_interval, progress) or duration.is_done(progress):
                progress = data.validate(engine, progress, report)
            if due(config.checkpoint.save_interval, progress):
                save(progress)
            report.paused(time.perf_counter() - paused)
        if progress.iteration > first and not due(config.checkpoint.save_interval, progress):
            save(progress)
        saves.wait()
        if duration.is_done(progress) and progress.iteration > first:
            data.test(engine, progress, report)
        log.info(f"stopped: {reason}")
        return progress


def _agree_on_files(config: RunConfig, runtime: Runtime) -> dict[str, str]:
    """That all ranks read the same data, of which the digests, and save into one folder."""
    world = runtime.context.world
    if config.checkpoint.save is not None and runtime.launch.local_world_size < world.size:
        refuse_separate_disks(config.checkpoint.save, runtime.context)
    sources = data_sources(config.data)
    agree_on_data(sources, world)
    announce_shared_corpora(config.data, sources)
    return sources


def _save(
    engine: Engine,
    runtime: Runtime,
    sources: Mapping[str, str],
    saves: BackgroundSaves,
    data: DataFeed,
    progress: Progress,
) -> None:
    """A checkpoint says what was trained on, so that has to be what was there at the start."""
    data.check_unchanged()
    loss = data.validation_loss(progress)
    save_checkpoint(
        runtime.config, engine, progress, runtime, sources, saves=saves, validation_loss=loss
    )


def plan_step(
    config: RunConfig,
    batches: BatchSchedule,
    duration: Duration,
    progress: Progress,
    curriculum: Curriculum | None = None,
) -> StepPlan:
    """What the next optimizer step should do: a pure function of how far the run is."""
    seen = progress.consumed_samples
    total = duration.total_samples
    whole = config.data.seq_length
    return StepPlan(
        num_microbatches=batches.num_microbatches_at(seen),
        global_batch_size=batches.global_batch_size_at(seen),
        learning_rate=learning_rate(
            config.schedule,
            samples=seen,
            tokens=progress.consumed_tokens,
            total_samples=total,
            global_batch_size=batches.global_batch_size,
        ),
        weight_decay=weight_decay(
            config.schedule, config.optimizer.weight_decay, samples=seen, total_samples=total
        ),
        seq_length=curriculum.length_at(progress.iteration) if curriculum else whole,
    )


def _range_of(iteration: int, ranges: Sequence[range]) -> range | None:
    return next((each for each in ranges if iteration in each), None)


def _pass_over(
    batches: Iterator[RawBatch], plan: StepPlan, progress: Progress, skipped: range
) -> Progress:
    """Read what an iteration would have trained on, and train nothing."""
    for _ in range(plan.num_microbatches):
        next(batches)
    if progress.iteration + 1 == skipped[-1]:
        log.info(
            f"Skipped iterations {skipped[0]} to {skipped[-1]} due to "
            "--skip-train-iteration-range flag."
        )
    return progress.after(
        samples=plan.global_batch_size,
        tokens=plan.global_batch_size * plan.seq_length,
        skipped=True,
        nonfinite=False,
    )


def due(interval: int | None, progress: Progress) -> bool:
    """Whether something that happens every `interval` iterations happens now; 0 is never."""
    return bool(interval) and progress.iteration % (interval or 1) == 0


def state_of(progress: Progress, engine: Engine) -> dict[str, object]:
    """What has to be equal on every rank for the next step to be one step."""
    return progress.to_plain() | {"loss scale": engine.loss_scale}


def _data_feed(task: PretrainTask, runtime: Runtime, duration: Duration) -> DataFeed:
    return DataFeed(
        task, runtime.config, runtime.context, runtime.launch, runtime.tokenizer, duration
    )


def _step_log(
    task: PretrainTask, runtime: Runtime, build: ModelBuild, duration: Duration, progress: Progress
) -> StepLog:
    config, world = runtime.config, runtime.context.world
    report = StepLog(
        config.logging,
        duration,
        flops_per_token=lru_cache(
            lambda length: task.flops_per_token(config.model, replace(build, seq_length=length))
        ),
        world_size=world.size,
        is_writer=world.is_last,
        purge_step=progress.iteration + 1 if progress.iteration else 0,
        with_length=curriculum_of(config) is not None,
        losses=task.losses,
        timers=runtime.timers,
    )
    report.text("flags", _as_block(config.to_plain()))
    if config.engine.deepspeed:
        _announce_deepspeed(config, report, replicas=runtime.context.dp.size)
    return report


def _announce_deepspeed(config: RunConfig, report: StepLog, *, replicas: int) -> None:
    """Say and store all that DeepSpeed goes by, so that no default of its own is left unseen."""
    given = recorded_json(config, data_parallel_size=replicas)
    log.info("DeepSpeed's JSON, complete:\n" + json.dumps(given, indent=1))
    for remark in deepspeed_plan(config, data_parallel_size=replicas).remarks:
        log.info(f"DeepSpeed's JSON: {remark}")
    report.text("deepspeed", _as_block(given))


def _as_block(values: Mapping[str, Any]) -> str:
    return "```\n" + json.dumps(values, indent=1) + "\n```"


def _num_parameters(engine: Engine, stages: Group) -> int:
    """Parameters of the whole model; what several pipeline stages hold counts once."""
    tensors = engine.state(optimizer=False).tensors
    mine = {tensor.name: math.prod(tensor.global_shape) for tensor in tensors}
    whole: dict[str, int] = {}
    for sizes in all_gather_object(mine, stages):
        whole |= sizes
    return sum(whole.values())


def _announce(
    task: PretrainTask,
    runtime: Runtime,
    build: ModelBuild,
    engine: Engine,
    duration: Duration,
    progress: Progress,
) -> None:
    """Say what is about to be trained, on what, for how long, and how FLOPs are counted."""
    config, grid = runtime.config, runtime.context.topology
    parameters = _num_parameters(engine, runtime.context.pp)
    batches = duration.batch_schedule
    left = duration.total_samples - progress.consumed_samples
    count, curriculum = token_count(config, batches), curriculum_of(config)
    tokens = count.before(duration.total_iterations) - count.before(progress.iteration)
    flops = task.flops_per_token(config.model, build)
    log.info(
        f"{task.name} with {parameters:,} parameters in {config.precision.precision.value}; "
        f"{grid.world_size} {'rank' if grid.world_size == 1 else 'ranks'} "
        f"(tp {grid.tp} x pp {grid.pp} x dp {grid.dp}) on {device.name()}\n"
        f"global batch {batches.global_batch_size} in micro-batches of "
        f"{batches.micro_batch_size}; from iteration {progress.iteration} to "
        f"{duration.total_iterations}: {left:,} samples, "
        f"{tokens:,} tokens to go\n"
        f"{flops / 1e6:,.1f} MFLOP per token, forward and backward, by {FLOPS_CONVENTION}"
        + (f"\ncurriculum {curriculum}" if curriculum else "")
    )


def _norms(config: RunConfig, engine: Engine) -> dict[str, float]:
    return {"params_norm": engine.params_norm()} if config.logging.log_params_norm else {}
