"""Whether layers can be compiled (`--compile`), and steps captured (`--cuda-graph`).

The one needs a compiler and flags whose code can be traced, the other passes without the host.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from megatron import device
from megatron.config.model import ModelConfig
from megatron.config.parallel import PipelineSchedule
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MachineError, MegatronError, first_line
from megatron.preflight.run import RunPlan

_Refusal = tuple[str, str, str]  # flags, why they are refused, and what to do instead


def compiled_layers_go_with_the_other_flags(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that no flag of a run with --compile asks for what compiled layers cannot do."""
    if plan.config.training.compile:
        problem = "transformer layers cannot be compiled"
        yield from _beside("--compile", problem, _not_compiled(plan.config))


def captured_steps_go_with_the_other_flags(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that no flag of a run with --cuda-graph makes the passes of a step ask the host."""
    if plan.config.training.cuda_graph:
        problem = "the passes of a step cannot be captured"
        yield from _beside("--cuda-graph", problem, _not_captured(plan.config))


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


def _beside(flag: str, problem: str, refusals: Iterable[_Refusal]) -> Iterator[MegatronError]:
    for given, why, instead in refusals:
        yield ConfigError(
            f"{problem}: {why}",
            found=f"{flag}, {given}",
            fix=f"{instead}, or leave {flag} out",
        )


def _sizes_on_the_host(model: ModelConfig) -> Iterator[_Refusal]:
    if model.has_experts:
        given = f"--num-experts {model.num_experts}"
        yield given, "the sizes of experts' matrices are read by the host", "use a dense model"


def _not_compiled(config: RunConfig) -> Iterator[_Refusal]:
    """Yield flags, why they exclude compiled layers, and what to do instead."""
    model, training = config.model, config.training
    if config.engine.deepspeed:
        yield "--deepspeed", "the engine of DeepSpeed does not compile", "leave --deepspeed out"
    yield from _sizes_on_the_host(model)
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


def _not_captured(config: RunConfig) -> Iterator[_Refusal]:
    """Yield flags, why they exclude captured passes, and what to do instead."""
    model, training, parallel = config.model, config.training, config.parallel
    if config.engine.deepspeed:
        why = "DeepSpeed waits for the device in each step"
        yield "--deepspeed", why, "leave --deepspeed out"
    yield from _sizes_on_the_host(model)
    if model.attention_dropout > 0:
        given = f"--attention-dropout {model.attention_dropout}"
        why = "the host seeds the kernels that drop scores"
        yield given, why, "use --attention-dropout 0"
    if training.activations.offload_layers:
        number = training.cpu_offloading_num_layers
        given = f"--cpu-offloading-num-layers {number}" if number else "--checkpoint-in-cpu"
        yield given, "activations wait in memory of the host", "recompute them instead"
    if parallel.sharding.shards_gradients:
        given = f"--data-parallel-sharding-strategy {parallel.sharding}"
        yield given, "memory of gradients comes and goes", "use optim"
    if parallel.overlap_param_gather:
        why = "parameters are on their way when a step begins"
        yield "--overlap-param-gather", why, "leave --overlap-param-gather out"
    if parallel.check_collectives:
        why = "ranks compare each communication before it starts"
        yield "--check-collectives", why, "leave --check-collectives out"
    if config.logging.log_timers_to_tensorboard:
        why = "timers wait for the device"
        yield "--log-timers-to-tensorboard", why, "leave --log-timers-to-tensorboard out"


CHECKS = (
    compiled_layers_go_with_the_other_flags,
    compilers_are_installed,
    captured_steps_go_with_the_other_flags,
)
