"""Buffers of parameters that replicas share out: one for each unit, of which each keeps a share.

Arithmetic, and memory for the shares. Gradients and parameters are laid out by the same function,
so that a rank owns the same elements of both.
"""

import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.context import ReplicaGroups
from megatron.mpu.partition import is_shared_out, sharding_unit
from megatron.optimizer.buckets import ElementRange, ReductionTime, owned_ranges, plan_flat
from megatron.optimizer.grad_buffer import Flat, turn_of
from megatron.optimizer.releasable import ReleasableTensor


def sharded_flats(
    parameters: Iterable[Parameter],
    replicas: ReplicaGroups,
    dtype_of: Callable[[Parameter], torch.dtype],
) -> tuple[Flat, ...]:
    """Return a buffer for the parameters of each unit, group of replicas, dtype and device.

    Args:
        dtype_of: the dtype of the buffer that a parameter comes into.
    """
    by_kind: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in parameters:
        unit, experts = sharding_unit(parameter), is_shared_out(parameter)
        kind = (unit, experts, parameter.dtype, parameter.device)
        by_kind.setdefault(kind, []).append(parameter)
    return tuple(_flat(tuple(members), replicas, dtype_of) for members in by_kind.values())


def _flat(
    members: tuple[Parameter, ...],
    replicas: ReplicaGroups,
    dtype_of: Callable[[Parameter], torch.dtype],
) -> Flat:
    first, own = members[0], replicas.of(members[0])
    group = own.sharing
    counts = [parameter.numel() for parameter in members]
    # All have one turn, and so one bucket.
    held = any(turn_of(parameter) is ReductionTime.ALONE for parameter in members)
    turn = ReductionTime.HELD if held else ReductionTime.PROMPT
    plan = plan_flat(counts, [turn] * len(counts), shards=group.size, bucket_elements=sys.maxsize)
    dtype, device = dtype_of(first), first.device
    share = torch.zeros(plan.elements // group.size, dtype=dtype, device=device)
    room = ReleasableTensor(plan.elements, dtype=dtype, device=device)
    return Flat(members, plan, share, group, own.across, room)


def own_share(flat: Flat) -> ElementRange:
    """Return the elements of a sharded `flat` that this rank keeps."""
    (bucket,) = flat.plan.buckets
    return bucket.share(flat.group.rank, flat.group.size)


def own_ranges(flat: Flat) -> tuple[ElementRange, ...]:
    """Return for each parameter of `flat` its flattened elements that this rank owns."""
    return owned_ranges(flat.plan, flat.group.rank, flat.group.size)


def own_elements(flat: Flat) -> tuple[Tensor, ...]:
    """Return for each parameter of a sharded `flat` those elements in its share: [owned] each."""
    share = own_share(flat)
    return tuple(
        flat.data[max(place.start - share.start, 0) :][: owned.size]
        for place, owned in zip(flat.plan.places, own_ranges(flat))
    )
