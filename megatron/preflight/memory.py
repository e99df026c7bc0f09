"""Whether the memory of a rank can hold what training keeps: weights, gradients, optimizer state.

A lower bound, so that nothing is refused that could run: an even share of the model, without
activations. What a reader would get wrong: ranks on CPUs share the memory of their host.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron import device, host
from megatron.config.optimizer import StateDtype
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.host import in_gib
from megatron.model.accounting import expert_parameters, parameter_count
from megatron.model_build import vocabulary
from megatron.optimizer.update_rule import state_kinds
from megatron.preflight.experts import expert_grid
from megatron.preflight.run import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """Bytes that a rank holds for the whole run, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    waiting: int = 0  # of the optimizer's, in host memory

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer

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
    half = config.precision.precision.is_half
    kinds = state_kinds(config.optimizer).values()
    own = 4 if half else width
    state = sum(2 if kind is StateDtype.BF16 else own for kind in kinds) + (4 if half else 0)
    share = parameters if updated is None else updated
    sharding = config.parallel.sharding
    gradients = share if sharding.shards_gradients else parameters
    offloads = config.optimizer.optimizer_cpu_offload
    return KeptBytes(
        weights=(share if sharding.shards_parameters else parameters) * width,
        gradients=gradients * config.precision.gradient_precision.num_bytes,
        optimizer=share * state,
        waiting=int(share * state * config.optimizer.optimizer_offload_fraction) * offloads,
    )


def even_share(plan: RunPlan, rows: int) -> tuple[int, int]:
    """Return a rank's even share of the parameters, and of those that replicas share out.

    No rank has less than the one with the largest share, so these are lower bounds of its.

    Args:
        rows: of the vocabulary, padded.
    """
    config = plan.config
    parallel = config.parallel
    parameters = parameter_count(config.model, rows, config.data.seq_length)
    grid = expert_grid(plan)
    experts = 0 if grid is None else expert_parameters(config.model)
    experts_of_rank = 0 if grid is None else experts // grid.expert_ranks
    parameters_of_rank = (parameters - experts) // plan.model_ranks
    parameters_of_rank += experts_of_rank // parallel.pipeline_model_parallel_size
    # Of a stage each rank then updates equally many, experts or not.
    updated = parallel.num_distributed_optimizer_instances * parameters // plan.launch.world_size
    return parameters_of_rank, updated


def even_kept_bytes(plan: RunPlan) -> KeptBytes:
    """Return the bytes of an even share of the model: no rank has less than the largest of them.

    Raises:
        ConfigError: the vocabulary cannot be padded.
    """
    config = plan.config
    assert plan.tokenizer is not None  # noqa: S101  # invariant: callers have checked
    parameters, updated = even_share(plan, vocabulary(config, plan.tokenizer).padded)
    shares = config.parallel.sharding.shards_state
    return kept_bytes(config, parameters, updated=updated if shares else None)


def weights_and_state_fit_in_memory(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that weights, gradients and optimizer state fit into memory.

    The kernel kills a process that runs out of memory, without a message.
    """
    config, replicas = plan.config, plan.data_parallel_size
    if config.engine.deepspeed or replicas is None or plan.tokenizer is None:
        return  # DeepSpeed shares out and offloads by rules of its own
    try:
        rows = vocabulary(config, plan.tokenizer).padded
    except ConfigError:
        return  # vocabulary_pads_to_an_even_size reports it
    on_host = config.launch.device is DeviceKind.CPU or not device.cuda_is_available()
    room = (
        host.available_memory_bytes()
        if on_host
        else device.total_memory_bytes(plan.launch.device_index)
    )
    if room is None:
        return
    ranks = plan.launch.local_world_size if on_host else 1
    parameters_of_rank, updated = even_share(plan, rows)
    shares = config.parallel.sharding.shards_state
    kept = kept_bytes(config, parameters_of_rank, updated=updated if shares else None)
    if not on_host:
        yield from _waiting_problems(kept.waiting, plan.launch.local_world_size)
    needed = kept.needed(on_host=on_host)
    if ranks * needed <= room:
        return
    flags_that_fit = _flags_that_fit(
        config, parameters_of_rank, updated, room // ranks, on_host=on_host
    )
    enough = plan.model_ranks * -(-ranks * needed // max(1, room))
    yield MachineError(
        "the weights and what training keeps of them do not fit into memory",
        found=f"about {in_gib(kept.total)} on a rank (weights {in_gib(kept.weights)}, gradients "
        f"{in_gib(kept.gradients)}, optimizer {in_gib(kept.optimizer)})"
        + (f" on each of {ranks} ranks of this host" if ranks > 1 else "")
        + f"; {in_gib(room)} are there",
        fix=f"add {flags_that_fit}"
        if flags_that_fit is not None
        else f"spread the model over at least {enough} ranks with as much memory for each "
        "(--tensor-model-parallel-size x --pipeline-model-parallel-size), or train a smaller one",
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


def _flags_that_fit(
    config: RunConfig, parameters: int, updated: int, room: int, *, on_host: bool
) -> str | None:
    """Return the flags of the least that replicas have to share out more, if that is enough."""
    full = ShardingStrategy.OPTIM_GRADS_PARAMS
    for flags, sharding in (
        ("--use-distributed-optimizer", ShardingStrategy.OPTIM),
        (f"--data-parallel-sharding-strategy {full}", full),
    ):
        parallel = replace(config.parallel, data_parallel_sharding_strategy=sharding)
        kept = kept_bytes(replace(config, parallel=parallel), parameters, updated=updated)
        if kept.needed(on_host=on_host) <= room:
            return flags
    return None
