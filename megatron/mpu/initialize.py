"""Megatron's accessor names, over the one context of this process.

For entry points and user code that cannot pass a ParallelContext. Nothing below the training edge
may import this module.
"""

import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.errors import NotInitialisedError
from megatron.mpu.context import DEFAULT_TIMEOUT, Group, ParallelContext
from megatron.mpu.topology import Coord, Topology
from megatron.peers.activity import Activity


@dataclass(frozen=True, slots=True)
class _Current:
    context: ParallelContext
    call_site: str  # where it was made, for the message about a second time


_current: _Current | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> ParallelContext:
    """Build this process's groups and store them; all ranks must call this together.

    Args:
        expert_tensor_parallel_size: None: `tensor_model_parallel_size`.
        timeout: of every collective in the groups that are made here.

    Raises:
        NotInitialisedError: it was called before, or torch.distributed has no process group yet.
        ConfigError: the ranks do not divide into whole model replicas.
    """
    flags = ParallelConfig(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor_parallel_size,
    )
    return initialize_groups(flags, timeout)


def initialize_groups(
    flags: ParallelConfig, timeout: timedelta, activity: Activity | None = None
) -> ParallelContext:
    """Do the same for the flags of a run.

    Args:
        activity: to which the groups give the time that this process waits for others.
    """
    global _current
    if _current is not None:
        raise NotInitialisedError(
            "model parallelism is already initialised in this process",
            found=f"first initialised at {_current.call_site}",
            fix="remove the second call, or call destroy_model_parallel() before it",
        )
    if not dist.is_initialized():
        raise NotInitialisedError(
            "initialize_model_parallel() was called before the processes found each other",
            fix="call initialize_megatron() or torch.distributed.init_process_group() first",
        )
    topology = Topology.of(flags, dist.get_world_size())
    callers = (frame for frame in traceback.extract_stack() if frame.filename != __file__)
    *_, caller = callers
    context = ParallelContext.build(
        topology, timeout, check_seconds=flags.check_seconds, activity=activity
    )
    _current = _Current(context, f"{caller.filename}:{caller.lineno}")
    return context


def destroy_model_parallel() -> None:
    """Remove this process's context and end its groups, so that others can be made.

    The world process group stays. Does nothing when there is no context.
    """
    global _current
    if _current is None:
        return
    context, _current = _current.context, None
    groups = (
        *(context.axis(name) for name in Coord._fields),
        context.dp_cp,
        context.tp_cp,
        context.etp_ep,
        context.ep,
        context.etp,
        context.edp,
        context.model,
        *([] if context.all_weights is None else [context.all_weights]),
        context.host_tp_cp,
        *context.replicas.groups,
    )
    # One handle can serve several groups (see context._GroupMaker).
    for handle in {id(group.handle): group.handle for group in groups}.values():
        if handle is not None and dist.is_initialized():
            dist.destroy_process_group(handle)


def model_parallel_is_initialized() -> bool:
    """Return whether `initialize_model_parallel` was called in this process."""
    return _current is not None


def get_parallel_context() -> ParallelContext:
    """Return the context of this process; NotInitialisedError before there is one."""
    if _current is None:
        raise NotInitialisedError(
            "model parallelism is not initialised in this process",
            fix="call initialize_megatron() or initialize_model_parallel() first",
        )
    return _current.context


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """Return the group that shares one layer's weights; never None, which would mean the world."""
    return _handle(get_parallel_context().tp)


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """Return the group of the stages of one replica; never None."""
    return _handle(get_parallel_context().pp)


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Return the group of ranks with the same weights and other samples; never None.

    With context parallelism it also has those with other tokens of the same samples.
    """
    context = get_parallel_context()
    return _handle(context.dp_cp if with_context_parallel else context.dp)


def get_context_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks with other tokens of the same samples; never None."""
    return _handle(get_parallel_context().cp)


def get_expert_model_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that share the experts of a layer out; never None."""
    return _handle(get_parallel_context().ep)


def get_expert_tensor_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that share the matrices of each expert; never None."""
    return _handle(get_parallel_context().etp)


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks with the same experts; never None."""
    return _handle(get_parallel_context().edp)


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks of one whole replica (tp x pp); never None."""
    return _handle(get_parallel_context().model)


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks that share one layer's weights."""
    return get_parallel_context().tp.size


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return get_parallel_context().pp.size


def get_data_parallel_world_size() -> int:
    """Return the number of model replicas."""
    return get_parallel_context().dp.size


def get_context_parallel_world_size() -> int:
    """Return the number of ranks that share a sequence."""
    return get_parallel_context().cp.size


def get_expert_model_parallel_world_size() -> int:
    """Return the number of ranks that share the experts of a layer out."""
    return get_parallel_context().ep.size


def get_expert_tensor_parallel_world_size() -> int:
    """Return the number of ranks that share the matrices of each expert."""
    return get_parallel_context().etp.size


def get_model_parallel_world_size() -> int:
    """Return the number of ranks of one whole replica."""
    return get_parallel_context().model.size


def get_tensor_model_parallel_rank() -> int:
    """Return this process's index in its tensor-parallel group."""
    return get_parallel_context().tp.rank


def get_pipeline_model_parallel_rank() -> int:
    """Return this process's pipeline stage."""
    return get_parallel_context().pp.rank


def get_data_parallel_rank() -> int:
    """Return this process's replica."""
    return get_parallel_context().dp.rank


def get_context_parallel_rank() -> int:
    """Return this process's index in its context-parallel group."""
    return get_parallel_context().cp.rank


def get_expert_model_parallel_rank() -> int:
    """Return this process's index among the ranks that share experts out."""
    return get_parallel_context().ep.rank


def get_expert_tensor_parallel_rank() -> int:
    """Return this process's index among the ranks that share the matrices of each expert."""
    return get_parallel_context().etp.rank


def get_model_parallel_rank() -> int:
    """Return this process's index within its replica."""
    return get_parallel_context().model.rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first member of this process's tensor-parallel group."""
    return get_parallel_context().tp.ranks[0]


def get_data_parallel_src_rank() -> int:
    """Return the global rank of the first member of this process's data-parallel group."""
    return get_parallel_context().dp.ranks[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the global rank of this pipeline's first stage."""
    return get_parallel_context().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the global rank of this pipeline's last stage."""
    return get_parallel_context().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the next stage; the first stage follows the last."""
    pp = get_parallel_context().pp
    return pp.ranks[(pp.rank + 1) % pp.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the previous stage; the last stage precedes the first."""
    pp = get_parallel_context().pp
    return pp.ranks[(pp.rank - 1) % pp.size]


def is_pipeline_first_stage() -> bool:
    """Return whether this process holds the first pipeline stage."""
    return get_parallel_context().is_first_stage


def is_pipeline_last_stage() -> bool:
    """Return whether this process holds the last pipeline stage."""
    return get_parallel_context().is_last_stage


def _handle(group: Group) -> dist.ProcessGroup:
    assert group.handle is not None  # noqa: S101  # invariant: build() made every handle
    return group.handle
