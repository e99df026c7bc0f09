"""What every training does before its first step: refusals, the step log, announcements."""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron import device, log
from megatron.checkpoint.folder.shared_view import refuse_separate_disks
from megatron.config.deepspeed.plan import deepspeed_plan, recorded_json
from megatron.config.experts import LoadBalancing
from megatron.config.run import RunConfig
from megatron.engine.base import Engine, PretrainTask
from megatron.json_values import JsonObject
from megatron.launch import Launch
from megatron.lengths import curriculum as curriculum_of
from megatron.lengths import token_count
from megatron.loop.report import StepLog
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_gather_object, broadcast_object
from megatron.mpu.context import Group, ParallelContext
from megatron.preflight.agreement import agree_on_data
from megatron.progress import Duration, Progress
from megatron.timers import Timers
from megatron.trackers.redaction import redacted
from megatron.trackers.reporting import Trackers, open_trackers, services_of, writing_rank
from megatron.trackers.tracker import RunName, TrackedRun


def agree_on_files(
    save: str | None, sources: Mapping[str, str], launch: Launch, context: ParallelContext
) -> None:
    """Check that all ranks save into one folder and read the same data. All ranks call it together.

    Args:
        save: the folder of --save.
        sources: what the data hold, by name, in a form that ranks can compare.

    Raises:
        CheckpointError: the nodes do not see one folder.
        DataError: the ranks do not see the same data.
    """
    if save is not None and launch.local_world_size < context.world.size:
        refuse_separate_disks(save, context)
    agree_on_data(sources, context.world)


def open_step_log(
    task: PretrainTask,
    config: RunConfig,
    context: ParallelContext,
    build: ModelBuild,
    duration: Duration,
    progress: Progress,
    timers: Timers,
    run_name: RunName,
) -> StepLog:
    """Return the log of a run's steps, with the trackers open on the rank that writes to them.

    All ranks call it together: a run that needs a name and has none is given one.
    """
    if services_of(config.trackers) and not run_name.value:
        run_name.value = broadcast_object(secrets.token_hex(16), context.world)
    trackers = Trackers()
    if context.world.rank == writing_rank(config.trackers, context.world.size):
        trackers = open_trackers(
            TrackedRun(
                logging=config.logging,
                trackers=config.trackers,
                name=run_name.value,
                configs=_configs(config, replicas=context.dp.size),
                first_iteration=progress.iteration + 1,
            )
        )
    return StepLog(
        config.logging,
        duration,
        flops_per_token=lru_cache(
            lambda length: task.flops_per_token(config.model, replace(build, seq_length=length))
        ),
        world_size=context.world.size,
        with_length=curriculum_of(config) is not None,
        losses=task.losses,
        timers=timers,
        trackers=trackers,
    )


def announce_deepspeed(config: RunConfig, *, replicas: int) -> None:
    """Print DeepSpeed's complete JSON, its defaults included."""
    given = recorded_json(config, data_parallel_size=replicas)
    log.info("DeepSpeed's JSON, complete:\n" + json.dumps(given, indent=1))
    for remark in deepspeed_plan(config, data_parallel_size=replicas).remarks:
        log.info(f"DeepSpeed's JSON: {remark}")


def announce_run(
    engine: Engine,
    config: RunConfig,
    context: ParallelContext,
    build: ModelBuild,
    duration: Duration,
    progress: Progress,
) -> None:
    """Print the model, the data, the length of the run and the convention for FLOPs."""
    task, grid = engine.task, context.topology
    parameters = _num_parameters(engine, context.pp)
    batches = duration.batch_schedule
    left = duration.total_samples - progress.consumed_samples
    count, curriculum = token_count(config, batches), curriculum_of(config)
    tokens = count.before(duration.total_iterations) - count.before(progress.iteration)
    flops = task.flops_per_token(config.model, build)
    shared_out = config.model.has_experts and grid.shares_experts_out
    log.info(
        f"{task.name} with {parameters:,} parameters in {config.precision.precision.value}; "
        f"{grid.world_size} {'rank' if grid.world_size == 1 else 'ranks'} "
        f"(tp {grid.tp} x pp {grid.pp} x dp {grid.dp}"
        + (f" x cp {grid.cp}" if grid.cp > 1 else "")
        + (f", experts over ep {grid.ep} x etp {grid.expert_tp}" if shared_out else "")
        + f") on {device.name()}"
        + "".join(f", {name} {version}" for name, version in device.library_versions().items())
    )
    log.info(
        f"global batch {batches.global_batch_size} in micro-batches of "
        f"{batches.micro_batch_size}; from iteration {progress.iteration} to "
        f"{duration.total_iterations}: {left:,} samples, "
        f"{tokens:,} tokens to go"
    )
    log.info(
        f"{flops.model / 1e6:,.1f} MFLOP per token, forward and backward, by "
        f"{task.flops_convention}; {flops.causal / 1e6:,.1f} without masked scores, "
        f"{flops.hardware / 1e6:,.1f} with what is recomputed"
    )
    if curriculum:
        log.info(f"curriculum {curriculum}")
    balancing = config.model.moe_router_load_balancing_type
    if config.model.has_experts and balancing.depends_on is not None:
        log.info(
            f"results depend on the layout: --moe-router-load-balancing-type {balancing} depends "
            f"on {balancing.depends_on}; {LoadBalancing.SEQ_AUX_LOSS} does not"
        )


def _num_parameters(engine: Engine, stages: Group) -> int:
    """Count the parameters of the whole model; a tied parameter counts once."""
    tensors = engine.state(optimizer=False).tensors
    sizes = {tensor.name: math.prod(tensor.global_shape) for tensor in tensors}
    all_sizes: dict[str, int] = {}
    for of_stage in all_gather_object(sizes, stages):
        all_sizes |= of_stage
    return sum(all_sizes.values())


def _configs(config: RunConfig, *, replicas: int) -> dict[str, JsonObject]:
    """Return what trackers store of what the run was told."""
    given = recorded_json(config, data_parallel_size=replicas)
    configs: dict[str, JsonObject] = {"flags": config.to_plain()}
    if given:
        configs["deepspeed"] = given
    return {title: redacted(values) for title, values in configs.items()}
