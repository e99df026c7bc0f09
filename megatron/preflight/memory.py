"""Whether the memory of a rank can hold a step: weights, gradients, optimizer state, activations.

A lower bound, so that nothing is refused that could run: an even share of the model, and of the
activations what every rank has on average. What a reader would get wrong: ranks on CPUs share the
memory of their host.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron import device, host
from megatron.config.activations import RecomputeGranularity, RecomputeMethod
from megatron.config.deepspeed.plan import DeepSpeedPlan, deepspeed_plan
from megatron.config.engine import RemoteDevice, ZeroStage
from megatron.config.optimizer import OptimizerKind, StateDtype
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.host import in_gib
from megatron.model.accounting import expert_parameters, parameter_count, vit_parameter_count
from megatron.model.encoder_decoder.accounting import t5_parameter_count
from megatron.model.retrieval.accounting import biencoder_parameter_count
from megatron.model_build import vocabulary
from megatron.optimizer.update_rule import state_kinds
from megatron.preflight.activations import least_activation_bytes
from megatron.preflight.experts import expert_grid
from megatron.preflight.run import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """Bytes that a rank holds for the whole run, by purpose, and of a step its activations."""

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    waiting: int = 0  # of the weights and of the optimizer's, in host memory

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def needed(self, *, on_host: bool) -> int:
        """Return the bytes of memory of the device, which may be the host."""
        return self.total if on_host else self.total - self.waiting


def kept_bytes(config: RunConfig, parameters: int, *, updated: int | None = None) -> KeptBytes:
    """Return the bytes that the native engine holds for so many parameters of a rank.

    Weights in the model's dtype and gradients in the accumulation dtype; the optimizer has its
    state, and in half precision an fp32 copy of the weights, of those that are `updated` (None:
    all). Weights and gradients are of these alone where replicas share them out.
    """
    width = config.precision.precision.num_bytes
    # What waits on the host is whole.
    waiting = config.optimizer.optimizer_offload_fraction * config.optimizer.optimizer_cpu_offload
    whole, state = _state_bytes(config), _state_bytes(config, splits=True)
    share = parameters if updated is None else updated
    sharding = config.parallel.sharding
    gradients = share if sharding.shards_gradients else parameters
    return KeptBytes(
        weights=(share if sharding.shards_parameters else parameters) * width,
        gradients=gradients * config.precision.gradient_precision.num_bytes,
        optimizer=int(share * (whole * waiting + state * (1 - waiting))),
        waiting=int(share * whole * waiting),
    )


def zero_bytes(config: RunConfig, zero: DeepSpeedPlan, parameters: int, updated: int) -> KeptBytes:
    """Return the bytes that an engine of DeepSpeed holds at least, as `kept_bytes` does.

    Of gradients each stage of ZeRO keeps the part that a rank updates; the fp32 copies that ZeRO
    makes of fp32 weights, and its buckets, are left out.
    """
    if zero.stage == 0:  # our own optimizer updates, and has its buffer of gradients
        return kept_bytes(config, parameters)
    width = config.precision.precision.num_bytes
    weights = (updated if zero.stage == int(ZeroStage.PARAMETERS) else parameters) * width
    optimizer = updated * _state_bytes(config)
    waits = zero.offload_optimizer is not RemoteDevice.NONE
    return KeptBytes(
        weights=weights,
        gradients=0 if waits else updated * width,  # they go to the host part by part
        optimizer=optimizer,
        waiting=waits * optimizer + (zero.offload_param is not RemoteDevice.NONE) * weights,
    )


def _state_bytes(config: RunConfig, *, splits: bool = False) -> int:
    """Return the bytes of the optimizer's state for a parameter, with those of its fp32 copy.

    Args:
        splits: of which Adam keeps the lower half, where the upper one is the parameter.
    """
    precision = config.precision.precision
    own = 4 if precision.is_half else precision.num_bytes
    kinds = state_kinds(config.optimizer).values()
    state = sum(2 if kind is StateDtype.BF16 else own for kind in kinds)
    if splits and config.precision.splits_masters:
        return state + (2 if config.optimizer.optimizer is OptimizerKind.ADAM else 4)
    return state + (4 if precision.is_half else 0)


def even_share(plan: RunPlan) -> tuple[int, int]:
    """Return a rank's even share of the parameters, and of those that replicas share out.

    No rank has less than the one with the largest share, so these are lower bounds of its.

    Raises:
        ConfigError: the vocabulary cannot be padded.
    """
    config = plan.config
    assert plan.tokenizer is not None  # noqa: S101  # invariant: callers have checked
    parallel = config.parallel
    parameters = _model_parameters(plan, vocabulary(config, plan.tokenizer).padded)
    grid = expert_grid(plan)
    experts = 0 if grid is None else expert_parameters(config.model)
    experts_of_rank = 0 if grid is None else experts // grid.expert_ranks
    parameters_of_rank = (parameters - experts) // plan.model_ranks
    parameters_of_rank += experts_of_rank // parallel.pipeline_model_parallel_size
    # Of a stage each rank then updates equally many, experts or not.
    updated = parallel.num_distributed_optimizer_instances * parameters // plan.launch.world_size
    return parameters_of_rank, updated


def _model_parameters(plan: RunPlan, rows: int) -> int:
    """Return the parameters of the whole model; of a BERT, without its heads and segments."""
    config, length = plan.config, plan.config.data.seq_length
    kind = plan.reads.kind(config.data)
    if config.encoder_decoder.decoder_layers(config.model.num_layers):
        return t5_parameter_count(config.model, config.encoder_decoder, rows, length)
    if kind is DatasetKind.IMAGES:
        return vit_parameter_count(config.model, config.vision)
    if kind is DatasetKind.ICT:
        return biencoder_parameter_count(config.model, config.retrieval, rows, length)
    return parameter_count(config.model, rows, length)


def even_kept_bytes(plan: RunPlan) -> KeptBytes:
    """Return the bytes of an even share of the model: no rank has less than the largest of them.

    Raises:
        ConfigError: the vocabulary cannot be padded.
    """
    parameters, updated = even_share(plan)
    shares = plan.config.parallel.sharding.shards_state
    return kept_bytes(plan.config, parameters, updated=updated if shares else None)


def least_bytes(plan: RunPlan) -> KeptBytes:
    """Return the least that an average rank of the run holds at the peak of a step.

    Raises:
        ConfigError: the run cannot be laid out, or DeepSpeed's JSON contradicts the flags.
    """
    config, replicas = plan.config, plan.data_parallel_size
    assert replicas is not None  # noqa: S101  # invariant: callers have checked
    if config.engine.deepspeed:
        zero = deepspeed_plan(config, data_parallel_size=replicas)
        kept = zero_bytes(config, zero, *even_share(plan))
    else:
        kept = even_kept_bytes(plan)
    num_towers = plan.reads.kind(config.data).num_towers
    saved = least_activation_bytes(config, replicas, num_towers=num_towers)
    return replace(kept, activations=sum(saved) // len(saved))


def training_fits_in_memory(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that weights, gradients, optimizer state and activations fit into memory.

    The kernel kills a process that runs out of memory, without a message.
    """
    config = plan.config
    if plan.data_parallel_size is None or plan.tokenizer is None:
        return
    try:
        kept = least_bytes(plan)
    except ConfigError:
        return  # other checks report it
    on_host = config.launch.device is DeviceKind.CPU or not device.cuda_is_available()
    room = (
        host.available_memory_bytes()
        if on_host
        else device.total_memory_bytes(plan.launch.device_index)
    )
    if room is None:
        return
    ranks = plan.launch.local_world_size if on_host else 1
    if not on_host:
        yield from _waiting_problems(kept.waiting, plan.launch.local_world_size)
    needed = kept.needed(on_host=on_host)
    if ranks * needed <= room:
        return
    enough = plan.model_ranks * -(-ranks * needed // max(1, room))
    flags = _flags_that_fit(plan, room // ranks, on_host=on_host)
    yield MachineError(
        "what training keeps does not fit into memory",
        found=f"about {in_gib(kept.total)} on a rank (weights {in_gib(kept.weights)}, gradients "
        f"{in_gib(kept.gradients)}, optimizer {in_gib(kept.optimizer)}, activations "
        f"{in_gib(kept.activations)})"
        + (f" on each of {ranks} ranks of this host" if ranks > 1 else "")
        + f"; {in_gib(room)} are there",
        fix=f"add {flags}"
        if flags is not None
        else f"spread the model over at least {enough} ranks with as much memory for each "
        "(--tensor-model-parallel-size x --pipeline-model-parallel-size), use a smaller "
        "--micro-batch-size or --seq-length, or train a smaller model",
    )


def _waiting_problems(waiting: int, ranks: int) -> Iterator[MachineError]:
    """Yield the error of too little host memory for what waits there, of all ranks of a host."""
    room = host.available_memory_bytes()
    if room is not None and ranks * waiting > room:
        yield MachineError(
            "the optimizer's state does not fit into the memory of the host",
            found=f"about {in_gib(waiting)} of each of {ranks} ranks of this host; {in_gib(room)} "
            "are there",
            fix="use a smaller --optimizer-offload-fraction, --use-distributed-optimizer, or more "
            "hosts",
        )


def _flags_that_fit(plan: RunPlan, room: int, *, on_host: bool) -> str | None:
    """Return the first flags of `_knobs` that are enough; None: none are."""
    for flags, config in _knobs(plan.config):
        with suppress(ConfigError):  # flags that do not go with the others
            changed = RunPlan(config, plan.launch, plan.tokenizer, reads=plan.reads)
            if least_bytes(changed).needed(on_host=on_host) <= room:
                return flags
    return None


def _knobs(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield flags that leave a rank more memory, with the run that they make, cheap ones first.

    Each way to share state out is tried alone and with whole layers recomputed.
    """
    training = replace(
        config.training,
        recompute_granularity=RecomputeGranularity.FULL,
        recompute_method=RecomputeMethod.UNIFORM,
        recompute_num_layers=1,
        recompute_modules=None,
    )
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    yield recompute, replace(config, training=training)
    for flags, shared in _shared_out(config):
        yield flags, shared
        yield f"{flags} {recompute}", replace(shared, training=training)


def _shared_out(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield flags by which replicas share out more of what they hold."""
    if config.engine.deepspeed:
        for stage in ZeroStage:
            engine = replace(config.engine, zero_stage=stage)
            yield f"--zero-stage {stage}", replace(config, engine=engine)
        return
    full = ShardingStrategy.OPTIM_GRADS_PARAMS
    for flags, sharding in (
        ("--use-distributed-optimizer", ShardingStrategy.OPTIM),
        (f"--data-parallel-sharding-strategy {full}", full),
    ):
        parallel = replace(config.parallel, data_parallel_sharding_strategy=sharding)
        yield flags, replace(config, parallel=parallel)
