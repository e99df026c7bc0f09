"""Whether experts can be shared out (`--expert-model-parallel-size`) beside the other flags."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from megatron.errors import ConfigError, MegatronError
from megatron.model.experts.mixture import check_sharing_out
from megatron.mpu.topology import Topology
from megatron.preflight.run import RunPlan


def experts_can_be_shared_out(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that experts, and the ranks of a stage, divide into groups that share them."""
    parallel, model = plan.config.parallel, plan.config.model
    if plan.data_parallel_size is None:
        return
    if not model.has_experts:
        if parallel.expert_model_parallel_size > 1:
            yield ConfigError(
                "there are no experts to share out",
                found=f"--expert-model-parallel-size {parallel.expert_model_parallel_size} without "
                "--num-experts",
                fix="leave it out, or give --num-experts",
            )
        return
    grid = _grid(plan)
    if grid.shares_experts_out:
        check_sharing_out(model, grid, splits_tokens=parallel.sequence_parallel)


def expert_grid(plan: RunPlan) -> Topology | None:
    """Return the grid of a run that shares experts out; None: it does not, or not evenly."""
    if plan.data_parallel_size is None or not plan.config.model.has_experts:
        return None
    with suppress(ConfigError):
        grid = _grid(plan)
        if grid.shares_experts_out:
            return grid
    return None


def _grid(plan: RunPlan) -> Topology:
    # Whether replicas divide into parts that share state out is a check of its own.
    flags = replace(plan.config.parallel, num_distributed_optimizer_instances=1)
    return Topology.of(flags, plan.launch.world_size)


def engine_can_share_experts_out(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that neither DeepSpeed trains nor products are in FP8."""
    config, grid = plan.config, expert_grid(plan)
    for flag, is_given, why in (
        ("--deepspeed", config.engine.deepspeed, "only the native engine does it"),
        ("--fp8-format", config.fp8.fp8_format is not None, "scales are of all experts together"),
    ):
        if grid is not None and is_given:
            yield ConfigError(
                f"experts cannot be shared out: {why}",
                found=f"--expert-model-parallel-size {grid.ep}, --expert-tensor-parallel-size "
                f"{grid.expert_tp}, {flag}",
                fix=f"leave {flag} out, or the other two",
            )


def engine_can_balance_experts_by_biases(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the engine that trains moves the biases of experts."""
    model = plan.config.model
    if model.has_experts and model.moe_router_enable_expert_bias and plan.config.engine.deepspeed:
        yield ConfigError(
            "only the native engine moves the biases of experts",
            found="--moe-router-enable-expert-bias, --deepspeed",
            fix="leave --deepspeed out, or use --moe-router-load-balancing-type seq_aux_loss",
        )


def shared_expert_can_be_overlapped(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that there is a shared expert to compute while tokens travel."""
    model = plan.config.model
    width = model.shared_expert_width
    if plan.config.parallel.moe_shared_expert_overlap and not (model.has_experts and width):
        yield ConfigError(
            "there is no shared expert that could be computed while tokens travel",
            found="--moe-shared-expert-overlap without --moe-shared-expert-intermediate-size",
            fix="leave it out, or give the width of the shared expert",
        )


CHECKS = (
    experts_can_be_shared_out,
    engine_can_share_experts_out,
    engine_can_balance_experts_by_biases,
    shared_expert_can_be_overlapped,
)
