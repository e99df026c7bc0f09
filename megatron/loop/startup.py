"""What every training does before its first step: refusals, the step log, announcements."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron import device, log
from megatron.checkpoint.folder.shared_view import refuse_separate_disks
from megatron.config.deepspeed.plan import deepspeed_plan, recorded_json
from megatron.config.experts import LoadBalancing
from megatron.config.run import RunConfig
from megatron.engine.base import Engine, PretrainTask
from megatron.launch import Launch
from megatron.lengths import curriculum as curriculum_of
from megatron.lengths import token_count
from megatron.loop.report import StepLog
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group, ParallelContext
from megatron.preflight.agreement import agree_on_data
from megatron.progress import Duration, Progress
from megatron.timers import Timers


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
) -> StepLog:
    """Return the log of a run's steps, with its flags stored in TensorBoard."""
    step_log = StepLog(
        config.logging,
        duration,
        flops_per_token=lru_cache(
            lambda length: task.flops_per_token(config.model, replace(build, seq_length=length))
        ),
        world_size=context.world.size,
        is_writer=context.world.is_last,
        purge_step=progress.iteration + 1 if progress.iteration else 0,
        with_length=curriculum_of(config) is not None,
        losses=task.losses,
        timers=timers,
    )
    step_log.text("flags", _as_block(config.to_plain()))
    return step_log


def announce_deepspeed(config: RunConfig, step_log: StepLog, *, replicas: int) -> None:
    """Print and store DeepSpeed's complete JSON, its defaults included."""
    given = recorded_json(config, data_parallel_size=replicas)
    log.info("DeepSpeed's JSON, complete:\n" + json.dumps(given, indent=1))
    for remark in deepspeed_plan(config, data_parallel_size=replicas).remarks:
        log.info(f"DeepSpeed's JSON: {remark}")
    step_log.text("deepspeed", _as_block(given))


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


def _as_block(values: Mapping[str, Any]) -> str:
    return "```\n" + json.dumps(values, indent=1) + "\n```"
