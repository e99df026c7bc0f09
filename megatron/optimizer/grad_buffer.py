"""Contiguous gradient buffers over a module's parameters, and their sum over data-parallel ranks.

Every trainable parameter gets `main_grad`, a view into one flat tensor per dtype. Matrix products
of linear layers add to it directly (`fuse_accumulation`), rows that were looked up in a table by
themselves, and a hook copies or adds what autograd has, so that nothing has to be zeroed. Where the
dtypes agree `grad` *is* that view from then on; of a half-precision parameter each new `grad` is
thrown away. Call `start_step` instead of setting `grad` to None in between. All ranks reduce the
same buckets in the same order, during the backward pass or after it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.errors import ConfigError
from megatron.mpu.collectives import Pending, start_all_reduce, start_reduce_scatter
from megatron.mpu.context import Group, ReplicaGroups
from megatron.mpu.partition import is_shared_out
from megatron.mpu.row_gradients import RowGradients, collect_rows
from megatron.mpu.weight_gradients import GradientSum, comes_later
from megatron.ops.cpu_memory import large_pages
from megatron.optimizer.buckets import (
    Bucket,
    ElementRange,
    FlatPlan,
    ReductionTime,
    default_bucket_elements,
    plan_flat,
)
from megatron.optimizer.releasable import ReleasableTensor

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Flat:
    """Parameters of one kind in a flat buffer of their values or gradients, and each one's offset.

    Without `room` it is `data`: [elements]. With it this rank keeps its share of one bucket alone,
    [elements / ranks], and `room` has memory for all of it for a time.
    """

    parameters: tuple[Parameter, ...]
    plan: FlatPlan
    data: Tensor
    group: Group  # the ranks with the same parameters, or those that share them out
    across: Group | None = None  # the ranks with the same share
    room: ReleasableTensor | None = None

    def place(self, index: int, within: Tensor) -> Tensor:
        """Return parameter `index` in `within`, a buffer of this layout, in its own shape."""
        start, stop = self.plan.places[index]
        return within[start:stop].view(self.parameters[index].shape)

    def views(self, room: ReleasableTensor) -> tuple[Tensor, ...]:
        """Return each parameter in `room`, which has no memory then, in its own shape."""
        room.take()  # views of nothing cannot be made
        views = tuple(self.place(index, room.tensor) for index in range(len(self.parameters)))
        room.release()
        return views


@dataclass(slots=True)
class Reduction:
    """The progress of one bucket's reduction in this step."""

    flat: Flat
    bucket: Bucket
    arrivals: list["Arrivals"] = field(default_factory=list)
    waits_for: int = 0  # parameters that have not had all of their gradients
    pending: Pending | None = None


@dataclass(slots=True)
class Arrivals:
    """The gradients that one parameter has had in this step."""

    parameter: Parameter
    name: str
    sum: GradientSum
    reduction: Reduction
    rows: RowGradients  # of a table, which autograd leaves out
    count: int = 0


class GradBuffer:
    """The gradients of some parameters in flat buffers: zeroed, summed and scaled together.

    A parameter with the attribute `reduce_first` (tied to one on another pipeline stage) or
    `sequence_parallel` (its gradient is a part of a sum over tensor-parallel ranks) is held back
    until `finish`, and lies in other buckets than those that are not.

    Args:
        replicas: the ranks over which gradients are summed.
        gradient_dtype: in which the gradients of half-precision parameters are kept; the others'
            are kept in the parameter's own dtype.
        bucket_elements: how many gradients are reduced in one collective, at least.
        fuse_accumulation: linear layers add their products to the sum of a weight's gradients
            themselves, in the matrix product where it can.
        overlap: start on a bucket as soon as its gradients are there.
        sharded: reduce-scatter: of a bucket each rank gets the sum of its own share only, and
            elsewhere keeps what only it has computed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        replicas: ReplicaGroups,
        *,
        gradient_dtype: torch.dtype,
        bucket_elements: int | None = None,
        fuse_accumulation: bool = False,
        overlap: bool = False,
        sharded: bool = False,
    ) -> None:
        self._names = {
            parameter: name for name, parameter in named_parameters if parameter.requires_grad
        }
        self._replicas, self._sharded, self._overlap = replicas, sharded, overlap
        self._num_passes: int | None = None
        self.flats = self._lay_out(gradient_dtype, bucket_elements)
        reductions = [
            Reduction(flat, bucket) for flat in self.flats for bucket in flat.plan.buckets
        ]
        # Promptly reduced ones first, of all flat buffers: this is the order on all ranks.
        self._reductions = sorted(reductions, key=lambda reduction: reduction.bucket.held)
        self._prompt = sum(not reduction.bucket.held for reduction in reductions)
        self._started = 0
        reduction_of = {
            reduction.flat.parameters[member]: reduction
            for reduction in reductions
            for member in reduction.bucket.members
        }
        places = {
            parameter: view
            for flat in self.flats
            if flat.room is not None
            for parameter, view in zip(flat.parameters, flat.views(flat.room))
        }
        self._arrivals: list[Arrivals] = []
        for parameter, name in self._names.items():
            reduction = reduction_of[parameter]
            total: Tensor = places.get(parameter, vars(parameter)["main_grad"])
            place = GradientSum(total, partial(self._make_room, reduction))
            arrivals = Arrivals(parameter, name, place, reduction, collect_rows(parameter))
            # Bound once: a lookup by parameter in every hook costs as much as a small gradient.
            hook = partial(self._take, arrivals)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if fuse_accumulation:
                place.accept_products(parameter, arrived=partial(hook, parameter))
            reduction.arrivals.append(arrivals)
            self._arrivals.append(arrivals)
        self.start_step()

    @property
    def size_bytes(self) -> int:
        """Memory of the gradients, padding included."""
        return sum(flat.data.numel() * flat.data.element_size() for flat in self.flats)

    def start_step(self, num_passes: int | None = None) -> None:
        """Forget all gradients, before the first backward pass of a step.

        Args:
            num_passes: how many gradients every parameter will get, one per micro-batch; None when
                that is not known, and then nothing is reduced before `finish`.
        """
        for arrivals in self._arrivals:
            arrivals.parameter.grad = None
            arrivals.sum.is_empty = True
            arrivals.count = 0
        self._num_passes, self._started = num_passes, 0
        for reduction in self._reductions:
            reduction.waits_for, reduction.pending = len(reduction.bucket.members), None

    def finish(self, before: Callable[[], None] | None = None) -> None:
        """Return once all gradients are summed over replicas; after the last backward pass.

        Args:
            before: sums the gradients of held parameters over ranks outside of the group, first.

        Raises:
            ConfigError: a parameter has had no gradient in this step.
        """
        self._check_all_arrived()
        self._start_until(self._prompt)
        if before is not None:
            before()
        self._start_until(len(self._reductions))
        shares: list[Pending] = []
        for reduction in self._reductions:
            if reduction.pending is not None:
                share = reduction.pending.wait()
                if reduction.flat.across is not None:
                    shares.append(start_all_reduce(share, reduction.flat.across))
        for pending in shares:
            pending.wait()

    def unwritten(self, size: int, besides: GradientSum | None) -> Tensor | None:
        """Return uint8 [size], memory of gradients of which none is there; None: not so much.

        It may be written to until one comes, but for that of `besides`, whose memory it is not: in
        the first forward pass of a step. Padding is left out, which stays zero.
        """
        is_empty = {
            arrivals.parameter: arrivals.sum.is_empty and arrivals.sum is not besides
            for arrivals in self._arrivals
        }
        for flat in self.flats:
            if flat.room is not None:
                continue
            start = stop = 0
            for place, parameter in sorted(
                zip(flat.plan.places, flat.parameters), key=itemgetter(0)
            ):
                if place.start != stop or not is_empty[parameter]:
                    start = place.start if is_empty[parameter] else place.stop
                stop = place.stop
                if (stop - start) * flat.data.itemsize >= size:
                    return flat.data[start:stop].view(torch.uint8)[:size]
        return None

    def _lay_out(
        self, gradient_dtype: torch.dtype, bucket_elements: int | None
    ) -> tuple[Flat, ...]:
        """Return a flat tensor per group and dtype of parameters, and set their `main_grad`."""
        by_kind: dict[tuple[bool, torch.dtype, torch.device], list[Parameter]] = {}
        for parameter in self._names:
            kind = (is_shared_out(parameter), parameter.dtype, parameter.device)
            by_kind.setdefault(kind, []).append(parameter)
        flats = []
        for (_, dtype, device), parameters in by_kind.items():
            replicas = self._replicas.of(parameters[0])
            group = replicas.sharing if self._sharded else replicas.all
            across = replicas.across if self._sharded else None
            plan = plan_flat(
                [parameter.numel() for parameter in parameters],
                [turn_of(parameter) for parameter in parameters],
                shards=group.size,
                bucket_elements=bucket_elements or default_bucket_elements(group.size),
            )
            stored_dtype = gradient_dtype if dtype in HALF_DTYPES else dtype
            if device.type == "cpu":
                # Of its own: in the memory that tensors of a step come from and go to, it would
                # leave holes between it and the weights and moments.
                data = large_pages(plan.elements * stored_dtype.itemsize).view(stored_dtype)
            else:
                data = torch.zeros(plan.elements, dtype=stored_dtype, device=device)
            flat = Flat(tuple(parameters), plan, data, group, across)
            for index, parameter in enumerate(parameters):
                parameter.main_grad = flat.place(index, data)  # type: ignore[attr-defined]
            flats.append(flat)
        return tuple(flats)

    def _make_room(self, reduction: Reduction) -> None:
        """Make sure that the gradients of a bucket have memory."""

    def _take(self, arrivals: Arrivals, parameter: Parameter) -> None:
        """Add one more gradient of `parameter`; called by autograd."""
        if comes_later(parameter):
            return
        place, gradient = arrivals.sum, parameter.grad
        # Autograd calls this also where a layer gave it nothing, and where it has added itself.
        if gradient is not None and gradient is not place.total:
            place.add(gradient)
        elif place.is_empty:
            place.begin()
            place.total.zero_()
            place.is_empty = False
        parameter.grad = place.total if place.total.dtype == parameter.dtype else None
        arrivals.rows.add_to(place.total)
        arrivals.count += 1
        self._arrived(arrivals)

    def _arrived(self, arrivals: Arrivals) -> None:
        """Reduce a bucket early if this was its last gradient and that is wanted."""
        reduction = arrivals.reduction
        if reduction.pending is not None:
            raise ConfigError(
                "a gradient came after its sum over data-parallel ranks had begun",
                found=f"{arrivals.name} had {arrivals.count} gradients, for "
                f"{self._num_passes} micro-batches",
                fix="start_step() before the first backward pass of a step, with the number of "
                "its passes; or leave out --overlap-grad-reduce",
            )
        if arrivals.count == self._num_passes:
            reduction.waits_for -= 1
            if self._overlap:
                self._start_ready()

    def _start_ready(self) -> None:
        """Start the reduction of buckets in order, up to the first that is not ready."""
        ready = self._started
        while ready < self._prompt and not self._reductions[ready].waits_for:
            ready += 1
        self._start_until(ready)

    def _start_until(self, stop: int) -> None:
        for reduction in self._reductions[self._started : stop]:
            reduction.pending = self._start(reduction)
        self._started = max(self._started, stop)

    def _start(self, reduction: Reduction) -> Pending:
        # On CUDA a collective waits for what the current stream was given so far; autograd runs
        # hooks on the stream of the gradients.
        flat, group = reduction.flat, reduction.flat.group
        whole = cut(flat.data, reduction.bucket.range)
        if not self._sharded:
            return start_all_reduce(whole, group)
        share = reduction.bucket.share(group.rank, group.size)
        return start_reduce_scatter(whole, group, out=cut(flat.data, share))

    def _check_all_arrived(self) -> None:
        missing = [arrivals.name for arrivals in self._arrivals if not arrivals.count]
        if missing:
            more = len(missing) - _NAMES_SHOWN
            raise ConfigError(
                "some parameters took no part in the backward pass",
                found=", ".join(missing[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else ""),
                fix="use them in the loss, or give them requires_grad=False",
            )


def turn_of(parameter: Parameter) -> ReductionTime:
    """Return when the gradient of `parameter` may be reduced."""
    if getattr(parameter, "sequence_parallel", False):
        return ReductionTime.HELD
    if getattr(parameter, "reduce_first", False):
        return ReductionTime.ALONE
    return ReductionTime.PROMPT


def cut(flat: Tensor, range_: ElementRange) -> Tensor:
    """Return the elements of `range_` in a flat buffer, as a view."""
    return flat[range_.start : range_.stop]
