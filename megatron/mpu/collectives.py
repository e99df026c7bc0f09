"""Collectives over a `Group` that return at once when the group has one rank.

None of these is differentiable; `mappings` holds the autograd versions. A group of one gets its
own tensor back, not a copy, and works with torch.distributed uninitialised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import device
from megatron.mpu.context import Group

Op = Literal["sum", "mean", "max", "min"]

# torch 2.13 renamed these and warns at every use of the old names; 2.10 has only the old ones.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

# "mean" is a sum and a division: gloo has no average that can be relied on for every dtype.
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective under way; the tensor may be read only after `wait`."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result, once the current stream (CUDA) or this thread (CPU) may use it."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Reduce `tensor` over `group` in place and return it; "mean" needs a floating dtype."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()  # NCCL refuses strided tensors
    dist.all_reduce(dense, op=_OPS[op], group=group.handle)
    if op == "mean":
        dense.div_(group.size)
    return tensor if dense is tensor else tensor.copy_(dense)


def start_all_reduce(tensor: Tensor, group: Group) -> Pending:
    """Begin to sum a contiguous `tensor` over `group` in place, and return before it is done."""
    if group.size == 1:
        return Pending(tensor, None)
    assert tensor.is_contiguous()  # noqa: S101  # invariant: a matrix product
    return Pending(tensor, dist.all_reduce(tensor, group=group.handle, async_op=True))


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate every rank's `tensor` along `dim`, in group order; shapes must be equal."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()
    flat = dense.new_empty((group.size * dense.numel(),))
    _ALL_GATHER(flat, dense.view(-1), group=group.handle)
    parts = flat.view(group.size, *dense.shape)
    if dim % max(dense.dim(), 1) == 0:
        return parts.flatten(0, 1) if dense.dim() else parts
    return torch.cat(parts.unbind(0), dim=dim)


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum `tensor` over `group` and keep this rank's equal part of `dim`, which must divide."""
    if group.size == 1:
        return tensor
    assert tensor.shape[dim] % group.size == 0, tensor.shape  # noqa: S101  # invariant: callers pad
    parts = torch.stack(tensor.chunk(group.size, dim=dim))
    mine = torch.empty_like(parts[0])
    _REDUCE_SCATTER(mine.view(-1), parts.view(-1), group=group.handle)
    return mine


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Overwrite `tensor` with that of the rank at index `source` of `group`, and return it."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()
    dist.broadcast(dense, src=group.ranks[source], group=group.handle)
    return tensor if dense is tensor else tensor.copy_(dense)


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every rank's picklable `obj`, in group order."""
    if group.size == 1:
        return [obj]
    objects: list[Any] = [None] * group.size
    dist.all_gather_object(objects, obj, group=group.handle)
    return objects


def broadcast_object(obj: Any, group: Group, source: int = 0) -> Any:
    """The picklable `obj` of the rank at index `source` of `group`; the others' is ignored."""
    if group.size == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.handle)
    return box[0]


def barrier(group: Group) -> None:
    """Return once every rank of `group` has called this."""
    if group.size == 1:
        return
    if dist.get_backend(group.handle) == dist.Backend.NCCL:
        # Without a device NCCL guesses one from the rank, and warns.
        dist.barrier(group=group.handle, device_ids=[device.current().index])
    else:
        dist.barrier(group=group.handle)
