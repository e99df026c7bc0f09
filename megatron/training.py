"""pretrain() and the one training loop: everything else a run does is a call out of here.

The loop decides numbers and the engine obeys. If a feature cannot be added without growing `run`
by more than a line, the feature is in the wrong place.
"""

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from megatron import device, log
from megatron.arguments import ExtraArgsProvider
from megatron.checkpoint.background import BackgroundSaves
from megatron.checkpointing import load_checkpoint, model_build, save_checkpoint
from megatron.config.curriculum import Curriculum
from megatron.config.data import DataLoaderKind
from megatron.config.deepspeed_json import deepspeed_plan, recorded_json
from megatron.config.run import RunConfig
from megatron.data.data_sources import announce_shared_corpora, data_sources
from megatron.data.gpt_batch import shortened
from megatron.data.loaders import build_data_loader
from megatron.data.worker_budget import WorkerLoad, announce_worker_budget
from megatron.engine.base import DatasetRequest, Datasets, Engine, PretrainTask, RawBatch, StepPlan
from megatron.engine.build import build_engine
from megatron.errors import DataError
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.loop.anomaly import check_numbers
from megatron.loop.evaluate import evaluate
from megatron.loop.report import StepLog
from megatron.loop.stop import StopConditions
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.mpu.data import broadcast_batch
from megatron.mpu.meeting import Meeting
from megatron.optimizer.schedule import learning_rate, weight_decay
from megatron.preflight.agreement import agree_on_data, agree_on_state
from megatron.preflight.lengths import batch_schedule, num_samples, token_count
from megatron.preflight.lengths import curriculum as curriculum_of
from megatron.preflight.lengths import duration as duration_of
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
    sources = data_sources(config.data)
    agree_on_data(sources, context.world)
    announce_shared_corpora(config.data, sources)
    with ExitStack() as resources:
        engine = build_engine(config, task, build, runtime.tokenizer, runtime.timers)
        progress = load_checkpoint(config, engine, runtime, sources)
        data = resources.enter_context(closing(DataFeed(task, runtime, batches, duration)))
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
        report.begin()
        while (reason := stop.reason(progress, steps_done=progress.iteration - first)) is None:
            saves.look()
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


def _save(
    engine: Engine,
    runtime: Runtime,
    sources: Mapping[str, str],
    saves: BackgroundSaves,
    data: "DataFeed",
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


class DataFeed:
    """The datasets of a run, and the iterators over them that survive a resume."""

    def __init__(
        self, task: PretrainTask, runtime: Runtime, batches: BatchSchedule, duration: Duration
    ) -> None:
        config, context = runtime.config, runtime.context
        self._config, self._context, self._batches = config, context, batches
        self._total_samples = duration.total_samples
        patience_s = 60 * config.launch.distributed_timeout_minutes
        meeting = Meeting(context.world, patience_s=patience_s)
        self._datasets = task.datasets(
            DatasetRequest(
                data=config.data,
                tokenizer=runtime.tokenizer,
                num_samples=num_samples(config.training, duration, batches.global_batch_size),
                min_samples=batches.global_batch_size,
                seed=config.training.seed,
                is_builder=runtime.launch.local_rank == 0,
                wait=meeting.wait,
                beat=meeting.beat,
            )
        )
        announce_worker_budget(
            WorkerLoad(
                num_workers=config.data.num_workers,
                loaders=sum(len(_by_name(named, "")) for named in self._datasets),
                readers=max(1, runtime.launch.local_world_size // context.tp.size),
                batch_bytes=config.training.micro_batch_size * (config.data.seq_length + 1) * 8,
            )
        )
        self._valid: dict[str, Iterator[RawBatch]] | None = None
        self._validated: tuple[int, float] | None = None  # at which iteration, with what loss
        self._readers: list[Generator[RawBatch, None, None]] = []

    def close(self) -> None:
        """End the processes that read ahead, now rather than when memory is next collected."""
        while self._readers:
            self._readers.pop().close()

    def training(self, progress: Progress) -> Iterator[RawBatch]:
        """Micro-batches of this replica from where the run stands.

        Raises:
            DataError: the samples are read in order, once, and there are fewer than the run takes.
        """
        held, wanted = len(self._datasets.train), self._total_samples
        if self._config.data.dataloader_type is DataLoaderKind.SINGLE and held < wanted:
            raise DataError(
                "the training data holds fewer samples than the run takes",
                found=f"{held} samples, read once in order; the run takes {wanted}",
                fix="train on fewer samples, give more data, or use --dataloader-type cyclic",
            )
        return self._batches_of(self._datasets.train, progress.consumed_samples)

    def check_unchanged(self) -> None:
        """Raise DataError if a file of any dataset was replaced, truncated or appended to."""
        for named in self._datasets:
            for dataset in _by_name(named, "").values():
                dataset.check_unchanged()

    def validate(self, engine: Engine, progress: Progress, report: StepLog) -> Progress:
        """Evaluate on each group of validation data; the next call goes on with later samples.

        Groups advance alike, so one counter says where all of them are.
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
        """The loss of the weights as they are now on the first group; None if not evaluated."""
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
        result = evaluate(engine, batches, iterations=iterations, microbatches=microbatches)
        report.evaluation(name, result, progress)
        return result.mean

    def _batches_of(
        self, dataset: Any, consumed: int, *, over_and_over: bool = False
    ) -> Iterator[RawBatch]:
        """Micro-batches over the tensor-parallel group; only its first rank reads."""
        mine = self._epochs(dataset, consumed, over_and_over) if self._context.tp.is_first else None
        if mine is not None:
            self._readers.append(mine)
        return _shared(mine, self._context.tp)

    def _epochs(
        self, dataset: Any, consumed: int, over_and_over: bool
    ) -> Generator[RawBatch, None, None]:
        """Epoch after epoch for the cyclic order; the single order ends with its index."""
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
                yield batch
                if single and over_and_over and consumed == turn:
                    break
            if single and not over_and_over:
                return


def _by_name(datasets: Any, name: str) -> Mapping[str, Any]:
    """Datasets by the name of their group; a single one has the name of its use."""
    if datasets is None:
        return {}
    return datasets if isinstance(datasets, Mapping) else {name: datasets}


def _shared(batches: Iterator[RawBatch] | None, tensor_parallel: Group) -> Iterator[RawBatch]:
    while True:
        batch = None
        if batches is not None:
            batch = next(batches, None)
            if batch is None:
                raise DataError(
                    "the data ended before the run did",
                    found="an exhausted data loader",
                    fix="this is a mistake in counting samples; please report it with your flags",
                )
        yield broadcast_batch(None if batch is None else dict(batch), tensor_parallel)


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
