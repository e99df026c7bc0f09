"""Whether experts can be shared out (`--expert-model-parallel-size`) beside the other flags."""

from collections.abc import Iterator

from megatron.errors import ConfigError, MegatronError
from megatron.model.experts.mixture import check_sharing_out
from megatron.mpu.topology import Topology
from megatron.preflight.run import RunPlan


def experts_can_be_shared_out(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that experts, and the ranks of a stage, divide into groups that share them."""
    parallel, model = plan.config.parallel, plan.config.model
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    if ep <= 1 or plan.data_parallel_size is None:
        return
    if not model.has_experts:
        yield ConfigError(
            "there are no experts to share out",
            found=f"--expert-model-parallel-size {ep} without --num-experts",
            fix="leave it out, or give --num-experts",
        )
        return
    cp = parallel.context_parallel_size
    # Raises where ranks do not divide.
    grid = Topology(tp=tp, cp=cp, dp=plan.data_parallel_size, ep=ep)
    check_sharing_out(model, grid, sequence_parallel=parallel.sequence_parallel)


def experts_are_split_as_asked(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that experts are split over tensor-parallel ranks or shared out, not both."""
    parallel = plan.config.parallel
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    given = parallel.expert_tensor_parallel_size
    possible = 1 if ep > 1 else tp
    if not plan.config.model.has_experts or (tp if given is None else given) == possible:
        return
    yield ConfigError(
        "experts are split over tensor-parallel ranks, or whole ones are shared out",
        found=f"--expert-tensor-parallel-size {'not set' if given is None else given}, "
        f"--tensor-model-parallel-size {tp}, --expert-model-parallel-size {ep}",
        fix=f"use --expert-tensor-parallel-size {possible}",
    )


def engine_can_share_experts_out(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that neither DeepSpeed trains nor products are in FP8."""
    ep, config = plan.config.parallel.expert_model_parallel_size, plan.config
    for flag, is_given, why in (
        ("--deepspeed", config.engine.deepspeed, "only the native engine does it"),
        ("--fp8-format", config.fp8.fp8_format is not None, "scales are of all experts together"),
    ):
        if ep > 1 and is_given:
            yield ConfigError(
                f"experts cannot be shared out: {why}",
                found=f"--expert-model-parallel-size {ep}, {flag}",
                fix=f"leave {flag} out, or --expert-model-parallel-size",
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


CHECKS = (
    experts_can_be_shared_out,
    experts_are_split_as_asked,
    engine_can_share_experts_out,
    engine_can_balance_experts_by_biases,
)
