"""Whether layers can be compiled (`--compile`): a compiler, and flags whose code can be traced."""

from collections.abc import Iterator
from importlib.util import find_spec

from megatron import device
from megatron.config.parallel import PipelineSchedule
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MachineError, MegatronError, first_line
from megatron.preflight.run import RunPlan


def compiled_layers_go_with_the_other_flags(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that no flag of a run with --compile asks for what compiled layers cannot do."""
    if plan.config.training.compile:
        for given, why, fix in _refused(plan.config):
            yield ConfigError(
                f"transformer layers cannot be compiled: {why}",
                found=f"--compile, {given}",
                fix=f"{fix}, or leave --compile out",
            )


def compilers_are_installed(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that inductor finds a C++ compiler, and on CUDA Triton."""
    if not plan.config.training.compile:
        return
    # Imported here: it takes a second, and only these runs need it.
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        yield MachineError(
            "--compile needs a C++ compiler, and none was found",
            found=first_line(error),
            fix="install g++, name another compiler in CXX, or leave --compile out",
        )
    on_cuda = device.cuda_is_available() and plan.config.launch.device is not DeviceKind.CPU
    if on_cuda and find_spec("triton") is None:
        yield MachineError(
            "--compile needs Triton on CUDA, and it is not installed",
            found="no package triton",
            fix="pip install triton, or leave --compile out",
        )


def _refused(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield flags, why they exclude compiled layers, and what to do instead."""
    model, training = config.model, config.training
    if config.engine.deepspeed:
        yield "--deepspeed", "the engine of DeepSpeed does not compile", "leave --deepspeed out"
    if model.has_experts:
        given = f"--num-experts {model.num_experts}"
        yield given, "the sizes of experts' matrices are read by the host", "use a dense model"
    if model.attention_dropout > 0:
        given = f"--attention-dropout {model.attention_dropout}"
        yield given, "scores are dropped by number of the sample", "use --attention-dropout 0"
    if model.hidden_dropout > 0 and not training.bias_dropout_fusion:
        given = f"--no-bias-dropout-fusion, --hidden-dropout {model.hidden_dropout}"
        yield given, "only the operator is compiled", "leave --no-bias-dropout-fusion out"
    if training.activations.modules:
        given = f"--recompute-granularity {training.recompute_granularity}"
        yield given, "parts of a graph are not recomputed", "use --recompute-granularity full"
    if not training.gradient_accumulation_fusion:
        given = "--no-gradient-accumulation-fusion"
        yield given, "gradients of weights are added where they are computed", f"leave {given} out"
    sharding = config.parallel.sharding
    if sharding.shards_parameters:
        given = f"--data-parallel-sharding-strategy {sharding}"
        yield given, "memory of parameters comes and goes", "use optim_grads"
    if config.parallel.pipeline_schedule is PipelineSchedule.ZERO_BUBBLE:
        given = f"--pipeline-schedule {config.parallel.pipeline_schedule}"
        yield given, "graphs reuse what late gradients of weights need", "use 1f1b"


CHECKS = (compiled_layers_go_with_the_other_flags, compilers_are_installed)
