"""Whether a run in FP8 can work: precision, engine, layers, sizes of matrices, device."""

from collections.abc import Iterator

from megatron import device
from megatron.config.fp8 import Fp8Config, Fp8Format
from megatron.config.precision import Precision
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.mpu.layers import FP8_BLOCKS
from megatron.ops.scaled_matmul import E4M3_ALONE, OLDEST_DEVICE, runs_on
from megatron.preflight.run import RunPlan


def fp8_goes_with_the_other_flags(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a run in FP8 has a precision, an engine and linear layers that support it."""
    config = plan.config
    if config.fp8.fp8_format is None:
        return
    given = f"--fp8-format {config.fp8.fp8_format}"
    precision = config.precision.precision
    if precision not in (Precision.BF16, Precision.FP64):
        yield ConfigError(
            "FP8 needs a model in bfloat16 around it",
            found=f"{given}, a model in {precision}",
            fix="add --bf16 (or --fp64, for proofs that two layouts agree)",
        )
    if config.engine.deepspeed:
        yield ConfigError(
            "DeepSpeed does not train in FP8 here",
            found=f"{given} with --deepspeed",
            fix="leave --deepspeed out for the native engine, or --fp8-format",
        )
    if config.parallel.tp_comm_overlap:
        yield ConfigError(
            "scales of FP8 come from whole sequences, of which parts are not there yet",
            found=f"{given} with --tp-comm-overlap",
            fix="leave --tp-comm-overlap out, or --fp8-format",
        )


def fp8_has_layers(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the first and last layers outside FP8 are not all layers of the model."""
    fp8, layers = plan.config.fp8, plan.config.model.num_layers
    if fp8.fp8_format is not None and sum(fp8.ends) >= layers:
        yield ConfigError(
            "FP8 was asked for, and no transformer layer is left for it",
            found=f"--num-layers {layers}, the first {fp8.ends.first} and the last "
            f"{fp8.ends.last} without FP8",
            fix=f"let --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16 add up to less "
            f"than {layers}",
        )


def fp8_scales_fit_the_weights(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every rank's part of a weight is whole blocks of scales, and fits the device."""
    fp8 = plan.config.fp8
    if fp8.fp8_format is None:
        return
    multiple, tp = fp8.fp8_recipe.multiple, plan.config.parallel.tensor_model_parallel_size
    uneven = [f"{what} {size}" for what, size in _sizes(plan.config) if size % multiple]
    if uneven:
        yield ConfigError(
            f"sizes of matrices on a rank are not multiples of {multiple}, as FP8 with scales "
            f"{fp8.fp8_recipe} needs",
            found=f"{', '.join(uneven)}; --tensor-model-parallel-size {tp}",
            fix=f"use widths that {multiple * tp} divides, or a smaller tensor-parallel size",
        )


def device_multiplies_fp8(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a CUDA device has the products of the recipe; on a CPU they are emulated."""
    config = plan.config
    if config.fp8.fp8_format is None or not device.cuda_is_available():
        return
    if config.launch.device is not DeviceKind.CPU:
        yield from _capability_problems(config.fp8, device.capability(), device.name())


def _capability_problems(
    fp8: Fp8Config, capability: tuple[int, int], name: str
) -> Iterator[MegatronError]:
    blocks = FP8_BLOCKS[fp8.fp8_recipe]
    if not all(runs_on(each, capability) for each in blocks):
        oldest = ".".join(map(str, max(OLDEST_DEVICE[each] for each in blocks)))
        yield MachineError(
            f"this device cannot multiply in FP8 with scales {fp8.fp8_recipe}",
            found=f"{name}, compute capability {'.'.join(map(str, capability))}; the first one "
            f"that can is {oldest}, and for blockwise the last one is 9.0",
            fix="use such a device, another --fp8-recipe, or leave --fp8-format out",
        )
    if fp8.fp8_format is Fp8Format.HYBRID and E4M3_ALONE.intersection(blocks):
        yield ConfigError(
            f"torch multiplies with scales {fp8.fp8_recipe} in e4m3 alone on CUDA",
            found=f"--fp8-format hybrid, --fp8-recipe {fp8.fp8_recipe}",
            fix="use --fp8-format e4m3: small blocks do not need the range of e5m2",
        )


def _sizes(config: RunConfig) -> Iterator[tuple[str, int]]:
    """Yield what decides the dimensions of a block's matrices, as a rank has it."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, width = model.num_attention_heads, model.query_groups, model.head_width
    yield "--hidden-size", model.hidden_size
    yield "queries, keys and values", (heads + 2 * groups) * width // tp
    yield "attention heads", heads * width // tp
    for flag, mlp_width in model.mlp_widths.items():
        yield flag, mlp_width // tp


CHECKS = (
    fp8_goes_with_the_other_flags,
    fp8_has_layers,
    fp8_scales_fit_the_weights,
    device_multiplies_fp8,
)
