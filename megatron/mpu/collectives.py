"""Collectives over a `Group` that return at once when the group has one rank.

None of these is differentiable; `mappings` holds the autograd versions. A group of one gets its
own tensor back, not a copy, and works with torch.distributed uninitialised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from megatron import device, spans
from megatron.mpu.collective_checks import MessageRecord
from megatron.mpu.context import Group

Op = Literal["sum", "mean", "max", "min"]
T = TypeVar("T")

# torch 2.13 renamed these and warns at every use of the old names; 2.10 has only the old ones.
_ALL_GATHER: Callable[..., dist.Work | None] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_REDUCE_SCATTER: Callable[..., dist.Work | None] = getattr(
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
    """A collective under way; the tensor may be read only after `wait`.

    `sent` keeps what is sent alive until then. `group` is that of the ranks that are waited for.
    """

    tensor: Tensor
    work: dist.Work | Sequence[dist.Work] | None
    sent: Tensor | None = None
    waited: Future[object] | None = None  # is done by `wait`
    group: Group | None = None

    def wait(self) -> Tensor:
        """Return the result, once the current stream (CUDA) or this thread (CPU) may use it."""
        if self.work is None:
            return self.tensor
        with spans.span(spans.WAIT), waiting_for(self.group):
            for work in self.work if isinstance(self.work, Sequence) else [self.work]:
                work.wait()
        if self.waited is not None and not self.waited.done():
            self.waited.set_result(None)
        return self.tensor


def all_reduce(tensor: Tensor, group: Group, op: Op = "sum") -> Tensor:
    """Reduce `tensor` over `group` in place and return it; "mean" needs a floating dtype."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()  # NCCL refuses strided tensors
    with calling(f"all_reduce({op})", dense, group):
        dist.all_reduce(dense, op=_OPS[op], group=group.handle)
    if op == "mean":
        dense.div_(group.size)
    return tensor if dense is tensor else tensor.copy_(dense)


def start_all_reduce(tensor: Tensor, group: Group) -> Pending:
    """Begin to sum a contiguous `tensor` over `group` in place, and return before it is done."""
    if group.size == 1:
        return Pending(tensor, None)
    assert tensor.is_contiguous()  # noqa: S101  # invariant: a matrix product
    with calling("all_reduce(sum)", tensor, group) as begun:
        work = dist.all_reduce(tensor, group=group.handle, async_op=True)
        return _pending(tensor, work, begun, group)


def start_all_gather(tensor: Tensor, group: Group, *, out: Tensor | None = None) -> Pending:
    """Begin to concatenate every rank's contiguous [n, ..] into [n * size, ..], in group order.

    Args:
        out: where the result goes; `tensor` may be this rank's own part of it.
    """
    if group.size == 1:
        return Pending(_put(tensor, out), None)
    assert tensor.is_contiguous()  # noqa: S101  # invariant: callers send what they computed
    whole = out
    if whole is None:
        whole = tensor.new_empty((group.size * tensor.shape[0], *tensor.shape[1:]))
    with calling("all_gather", tensor, group) as begun:
        work = _ALL_GATHER(whole, tensor, group=group.handle, async_op=True)
        return _pending(whole, work, begun, group)


def start_reduce_scatter(tensor: Tensor, group: Group, *, out: Tensor | None = None) -> Pending:
    """Begin to sum a contiguous [n, ..] over `group`; the result is this rank's [n / size, ..].

    `tensor` must not change before `wait` has returned.

    Args:
        out: where the result goes; it may be that part of `tensor`.
    """
    if group.size == 1:
        return Pending(_put(tensor, out), None)
    assert tensor.is_contiguous()  # noqa: S101  # invariant: a matrix product
    assert tensor.shape[0] % group.size == 0, tensor.shape  # noqa: S101  # invariant: checked
    own_part = out
    if own_part is None:
        own_part = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    with calling("reduce_scatter", tensor, group) as begun:
        work = _REDUCE_SCATTER(own_part, tensor, group=group.handle, async_op=True)
        return _pending(own_part, work, begun, group)


def start_shift(tensor: Tensor, group: Group) -> Pending:
    """Begin to send a contiguous `tensor` to the next rank of a ring; the result is the previous's.

    Shapes are equal on all ranks. `tensor` must not change before `wait` has returned.
    """
    if group.size == 1:
        return Pending(tensor, None)
    assert tensor.is_contiguous()  # noqa: S101  # invariant: callers send what they made
    following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    arrives = torch.empty_like(tensor)
    pending = _start_messages(
        "shift", [(True, following, tensor), (False, preceding, arrives)], group
    )
    return replace(pending, tensor=arrives, sent=tensor)


def exchange(
    sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None, group: Group
) -> None:
    """Send a contiguous tensor to one rank, and fill another one from a rank, both at once.

    Either may be None; the int is the index of that rank in the group, which does the reverse.
    """
    messages = [(True, sent[1], sent[0])] if sent is not None else []
    messages += [(False, received[1], received[0])] if received is not None else []
    if messages:
        _start_messages("exchange", messages, group).wait()


def _start_messages(
    operation: str, messages: Sequence[tuple[bool, int, Tensor]], group: Group
) -> Pending:
    with exchanging(operation, messages, group) as begun:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(  # type: ignore[no-untyped-call]
                    dist.isend if sends else dist.irecv, tensor, group.ranks[peer], group.handle
                )
                for sends, peer, tensor in messages
            ]
        )
        return _pending(messages[-1][2], works, begun, group)


def ring_order(rank: int, size: int) -> list[int]:
    """Return whose part `rank` has after 0, 1, .. `size` - 1 shifts to the next rank."""
    return [(rank - step) % size for step in range(size)]


def ring(own: Tensor, group: Group) -> Iterator[Tensor]:
    """Yield the contiguous `own` of every rank, in `ring_order`; the next one travels meanwhile."""
    held = own
    for step in range(1, group.size + 1):
        coming = start_shift(held, group) if step < group.size else None
        yield held
        if coming is not None:
            held = coming.wait()


def sum_on_ring(summand: Callable[[int], Tensor], group: Group) -> Tensor:
    """Return the sum over ranks of this rank's part; sums travel while summands are computed.

    The summands of a part are added in the order of ranks, from the one after the part's own.

    Args:
        summand: returns that of this rank to the part of another, [..], contiguous and new.
    """
    first, *others = ring_order((group.rank - 1) % group.size, group.size)
    total = summand(first)
    for part in others:
        coming = start_shift(total, group)
        total = summand(part)
        total += coming.wait()
    return total


def all_to_all(tensor: Tensor, group: Group) -> Tensor:
    """Send part i of [size, ..] to the rank at index i; part i of the result is from that rank."""
    if group.size == 1:
        return tensor
    assert tensor.shape[0] == group.size, tensor.shape  # noqa: S101  # invariant: callers cut it
    dense = tensor.contiguous()
    arrives = torch.empty_like(dense)
    with calling("all_to_all", dense, group):
        dist.all_to_all_single(arrives, dense, group=group.handle)
    return arrives


def start_all_to_all_rows(
    rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: Group
) -> Pending:
    """Begin to send the first sends[0] of [n, ..] to the rank at index 0, the next to index 1, ...

    The result is [sum(receives), ..], in the order of ranks. Numbers of rows may be zero. `rows`
    must not change before `wait` has returned.
    """
    if group.size == 1:
        return Pending(rows, None)
    dense = rows.contiguous()
    arrives = dense.new_empty((sum(receives), *dense.shape[1:]))
    with calling("all_to_all_rows", dense, group, is_equal=False) as begun:
        work = dist.all_to_all_single(
            arrives, dense, list(receives), list(sends), group=group.handle, async_op=True
        )
        return replace(_pending(arrives, work, begun, group), sent=dense)


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate every rank's `tensor` along `dim`, in group order; shapes must be equal."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()
    flat = dense.new_empty((group.size * dense.numel(),))
    with calling(f"all_gather(dim={dim})", dense, group):
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
    if dim % tensor.dim() == 0:  # the parts lie one after the other as they are
        return start_reduce_scatter(tensor.contiguous(), group).wait()
    parts = torch.stack(tensor.chunk(group.size, dim=dim))
    own_part = torch.empty_like(parts[0])
    with calling(f"reduce_scatter(dim={dim})", tensor, group):
        _REDUCE_SCATTER(own_part.view(-1), parts.view(-1), group=group.handle)
    return own_part


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Overwrite `tensor` with that of the rank at index `source` of `group`, and return it."""
    if group.size == 1:
        return tensor
    dense = tensor.contiguous()
    with calling(f"broadcast(source={source})", dense, group):
        dist.broadcast(dense, src=group.ranks[source], group=group.handle)
    return tensor if dense is tensor else tensor.copy_(dense)


def all_gather_object(obj: T, group: Group) -> list[T]:
    """Return every rank's picklable `obj`, in group order."""
    if group.size == 1:
        return [obj]
    with calling("all_gather_object", None, group):
        if group.observer is not None:
            answered = group.observer.objects_of_absent(obj, group.ranks)
            if answered is not None:
                return cast("list[T]", answered)
        objects = [obj] * group.size
        dist.all_gather_object(objects, obj, group=group.handle)
        return objects


def broadcast_object(obj: T, group: Group, source: int = 0) -> T:
    """Return the picklable `obj` of the rank at index `source`; others' are ignored."""
    if group.size == 1:
        return obj
    box = [obj]
    with calling(f"broadcast_object(source={source})", None, group):
        dist.broadcast_object_list(box, src=group.ranks[source], group=group.handle)
    return box[0]


def barrier(group: Group) -> None:
    """Return once every rank of `group` has called this."""
    if group.size == 1:
        return
    with calling("barrier", None, group):
        if dist.get_backend(group.handle) == dist.Backend.NCCL:
            # Without a device NCCL guesses one from the rank, and warns.
            dist.barrier(group=group.handle, device_ids=[device.current().index])
        else:
            dist.barrier(group=group.handle)


def calling(
    operation: str, tensor: Tensor | None, group: Group, *, is_equal: bool = True
) -> spans.Range:
    """Return the range of a trace for a call of all ranks of `group`, made in its `with` block.

    Under --check-collectives this returns once all of them are about to make it. Every function
    that calls torch.distributed itself does so in this range, or in that of `exchanging`.

    Args:
        operation: with everything that has to be equal: "all_reduce(sum)".
        tensor: what is sent; its shape and dtype have to be equal, if there is one.
        is_equal: of its shape that is so; else of that of its rows alone.
    """
    if group.observer is not None:
        with waiting_for(group):
            group.observer.collective(operation, tensor, group.ranks, is_equal=is_equal)
    sent = () if tensor is None else (tensor,)
    return _timed(spans.communication(group.name, operation, *sent), group)


def exchanging(
    operation: str, messages: Sequence[tuple[bool, int, Tensor]], group: Group
) -> spans.Range:
    """Do as `calling` for a batch of messages: (is it sent, index of the peer, tensor).

    Messages of two ranks are matched in the order of batches, and of messages in a batch.
    """
    if group.observer is not None:
        records = [
            MessageRecord(sends, group.ranks[peer], tensor) for sends, peer, tensor in messages
        ]
        with waiting_for(group):
            group.observer.messages(records)
    sent = [tensor for sends, _, tensor in messages if sends]
    return _timed(spans.communication(group.name, operation, *sent), group)


def waiting_for(group: Group | None) -> AbstractContextManager[None]:
    """Return the block of a wait for the ranks of `group`, which is measured if that is wanted."""
    if group is None or group.activity is None:
        return nullcontext()
    return group.activity.waiting()


def _timed(of_call: spans.Range, group: Group) -> spans.Range:
    return of_call if group.activity is None else _both(of_call, group.activity.waiting())


@contextmanager
def _both(of_call: spans.Range, wait: AbstractContextManager[None]) -> Iterator[spans.Begun]:
    with wait, of_call as begun:
        yield begun


def _pending(
    result: Tensor,
    work: dist.Work | Sequence[dist.Work] | None,
    begun: spans.Begun,
    group: Group,
) -> Pending:
    """Return communication under way, whose range in a trace lasts until it is done.

    Where a backend does not say when that is (gloo of reduce-scatters and messages), it lasts until
    it was waited for.
    """
    if begun is None or work is None or result.is_cuda:
        return Pending(result, work, group=group)
    waited = None
    try:
        end = work[0].get_future() if isinstance(work, Sequence) else work.get_future()
    except RuntimeError:  # not implemented, of gloo's
        end = waited = Future[object]()
    spans.last_until(begun, end)
    return Pending(result, work, waited=waited, group=group)


def _put(tensor: Tensor, out: Tensor | None) -> Tensor:
    """Return `tensor`, or `out` with its values, which may be there already."""
    if out is None:
        return tensor
    return out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor)
