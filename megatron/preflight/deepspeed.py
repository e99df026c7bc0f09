"""Whether a run through DeepSpeed can work: the package, its JSON, the flags, the machine.

DeepSpeed itself would find most of this after minutes, one thing at a time, or pass over it in
silence. Nothing of it is imported here.
"""

from collections.abc import Iterator

from megatron import device
from megatron.config.deepspeed.agreement import agreement_problems, stage_of
from megatron.config.deepspeed.keys import value_at
from megatron.config.deepspeed.plan import user_json
from megatron.config.deepspeed.version import version_problem
from megatron.config.fields import FieldsError, default_of, flag_name
from megatron.config.optimizer import OptimizerKind, StateDtype
from megatron.config.parallel import ParallelConfig, PipelineSchedule
from megatron.config.precision import Precision
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MegatronError
from megatron.json_values import JsonObject
from megatron.preflight.run import RunPlan

# Flags of the native engine, each with what takes its place.
_NATIVE_ALONE = {
    "use_distributed_optimizer": "--zero-stage 1, which shares the same state out",
    "data_parallel_sharding_strategy": "--zero-stage 1, 2 or 3",
    "num_distributed_optimizer_instances": "one part, which is what DeepSpeed has",
    "reshard_after_forward": "--zero-stage 3, which does so",
    "overlap_param_gather": "zero_optimization.overlap_comm in the JSON",
    "overlap_p2p_communication": "messages that are waited for at once, as its stages do",
    "overlap_grad_reduce": "zero_optimization.overlap_comm in the JSON",
    "ddp_bucket_size": "--zero-reduce-bucket-size",
    "num_virtual_stages_per_pipeline_rank": "one stage per rank, which is what DeepSpeed has",
    "num_layers_per_virtual_pipeline_stage": "one stage per rank, which is what DeepSpeed has",
    "check_collectives": "comms_logger in the JSON, which lists DeepSpeed's communication",
}

# Flags that set where pipeline stages begin; without DeepSpeed's own method both engines use them.
_CUTS = (
    "pipeline_layer_counts",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_balance",
    "pipeline_layer_costs",
)


def deepspeed_is_installed(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that DeepSpeed is installed, in a tested version."""
    if plan.config.engine.deepspeed and (problem := version_problem()) is not None:
        yield problem


def deepspeed_flags_have_an_engine(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that no flags of one engine are given to the other, where they have no effect."""
    config = plan.config
    if not config.engine.deepspeed:
        names = config.engine.flags_of_deepspeed
        if names:
            yield ConfigError(
                "flags of DeepSpeed were given, and the native engine trains",
                found=", ".join(flag_name(name) for name in names) + " without --deepspeed",
                fix="add --deepspeed, or leave them out",
            )
        return
    for name, instead in _NATIVE_ALONE.items():
        if getattr(config.parallel, name) != default_of(ParallelConfig, name):
            yield _of_the_native_engine(flag_name(name), instead)
    method = config.engine.pp_partition_method
    for name in _CUTS if method else ():
        if getattr(config.parallel, name) != default_of(ParallelConfig, name):
            yield ConfigError(
                "the boundaries of pipeline stages are given twice",
                found=f"--pp-partition-method {method}, {flag_name(name)}",
                fix="give one of the two",
            )
    schedule = config.parallel.pipeline_schedule
    if schedule not in (None, PipelineSchedule.ONE_F_ONE_B):
        yield _of_the_native_engine(f"--pipeline-schedule {schedule}", "--pipeline-schedule 1f1b")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config.optimizer, name) is StateDtype.BF16:
            yield _of_the_native_engine(f"{flag_name(name)} bf16", f"{flag_name(name)} fp32")
    if config.optimizer.optimizer not in (OptimizerKind.ADAM, OptimizerKind.SGD):
        yield _of_the_native_engine(f"--optimizer {config.optimizer.optimizer}", "--optimizer adam")
    if config.training.rerun_check_interval:
        yield ConfigError(
            "DeepSpeed computes no step twice: it adds gradients up as they come",
            found=f"--rerun-check-interval {config.training.rerun_check_interval} with --deepspeed",
            fix="leave --rerun-check-interval out, or --deepspeed",
        )
    if config.model.use_mup:
        yield _of_the_native_engine("--use-mup", "the learning rates of this width without it")
    if config.optimizer.optimizer_cpu_offload:
        yield _of_the_native_engine("--optimizer-cpu-offload", "--cpu-optimizer")


def deepspeed_json_agrees_with_the_flags(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every key of the JSON is known, possible, and in agreement with the flags."""
    if not plan.config.engine.deepspeed or plan.data_parallel_size is None:
        return
    try:
        user = user_json(plan.config)
    except FieldsError as several:
        yield from several.errors
        return
    yield from agreement_problems(plan.config, user, data_parallel_size=plan.data_parallel_size)


def zero_stage_fits_the_pipeline(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that pipelines use ZeRO 0 or 1, and DeepSpeed's pipeline engine."""
    engine, stages = plan.config.engine, plan.config.parallel.pipeline_model_parallel_size
    if not engine.deepspeed or stages == 1:
        return
    stage = stage_of(plan.config, _readable_json(plan))
    if stage >= 2:
        yield ConfigError(
            "ZeRO 2 and 3 do not go with pipelines: they share gradients out after every "
            "micro-batch, and a pipeline adds up those of all of them first",
            found=f"ZeRO stage {stage}, --pipeline-model-parallel-size {stages}",
            fix="use --zero-stage 1, or --pipeline-model-parallel-size 1",
        )
    if plan.config.parallel.use_tp_pp_dp_mapping:
        yield ConfigError(
            "DeepSpeed's pipelines number ranks with replicas nearer to each other than stages",
            found=f"--use-tp-pp-dp-mapping, --pipeline-model-parallel-size {stages}",
            fix="leave --use-tp-pp-dp-mapping out",
        )
    if not engine.use_pipeline_engine:
        yield ConfigError(
            "several pipeline stages need DeepSpeed's pipeline engine",
            found=f"--no-pipeline-parallel, --pipeline-model-parallel-size {stages}",
            fix="leave --no-pipeline-parallel out, or use --pipeline-model-parallel-size 1",
        )


def deepspeed_can_time_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that DeepSpeed's timers are off under pipelines.

    On stages before the last it starts them twice, which ends the run.
    """
    stages = plan.config.parallel.pipeline_model_parallel_size
    if not plan.config.engine.deepspeed or stages == 1:
        return
    user = _readable_json(plan)
    for path in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if value_at(user, path) is True:
            yield ConfigError(
                "DeepSpeed 0.19 cannot time its own pipeline: it ends at the first backward pass",
                found=f"{path} true, --pipeline-model-parallel-size {stages}",
                fix=f"leave {path} out; --log-timers-to-tensorboard times the parts of a step",
            )


def deepspeed_has_the_precision(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that ZeRO does not train in float16 on a CPU, which DeepSpeed refuses.

    At stage 0 the native optimizer makes the update, and supports it.
    """
    config = plan.config
    on_cpu = config.launch.device is DeviceKind.CPU or not device.cuda_is_available()
    if not config.engine.deepspeed or config.precision.precision is not Precision.FP16:
        return
    stage = stage_of(config, _readable_json(plan))
    if on_cpu and stage > 0:
        yield ConfigError(
            "DeepSpeed's ZeRO does not train in float16 on a CPU",
            found=f"--fp16, ZeRO stage {stage} on a CPU",
            fix="use --bf16, or --zero-stage 0, or the native engine: leave --deepspeed out",
        )


CHECKS = (
    deepspeed_is_installed,
    deepspeed_flags_have_an_engine,
    deepspeed_json_agrees_with_the_flags,
    zero_stage_fits_the_pipeline,
    deepspeed_can_time_the_run,
    deepspeed_has_the_precision,
)
# Those of flags and of the JSON, which depend on no machine.
_OF_MACHINE = (deepspeed_is_installed, deepspeed_has_the_precision)
FLAG_CHECKS = tuple(check for check in CHECKS if check not in _OF_MACHINE)


def _of_the_native_engine(given: str, instead: str) -> ConfigError:
    return ConfigError(
        "a flag of the native engine was given, and DeepSpeed trains",
        found=f"{given} with --deepspeed",
        fix=f"use {instead}; or leave --deepspeed out",
    )


def _readable_json(plan: RunPlan) -> JsonObject:
    """Return the JSON, or nothing where another check reports an error in it."""
    try:
        return user_json(plan.config)
    except ConfigError:
        return {}
