"""One rank's part of a named whole tensor, and the content of one checkpoint.

A `ShardedTensor` is used for both: saving reads its views, loading writes into them. Padding rows
(a vocabulary rounded up for tensor parallelism) are not stored in a checkpoint: they are removed
here when saving and zeroed when loading, so the padding may differ between runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, flat_boxes, from_slices, overlap, whole
from megatron.checkpoint.files.safetensors_io import dtype_code_of
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject
from megatron.mpu import partition as partitions
from megatron.mpu.partition import Partition


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a whole tensor on one rank: part `index` of `size` along `partition`.

    `true_rows`: rows of the whole tensor without padding; the rest, up to the padded size, are
    zeros and are not stored. None: no padding.
    """

    partition: Partition | None = None
    index: int = 0
    size: int = 1
    true_rows: int | None = None


REPLICATED = Placement()


class ShardPart(NamedTuple):
    """A box of the whole tensor, and a view of this rank's memory that holds its values."""

    box: Box
    view: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """The boxes of the whole tensor `name` that this rank holds, as views of its memory.

    `global_shape` has no padding rows; `padding` are views of the rows that are beyond it.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[ShardPart, ...]
    padding: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, name: str, tensor: Tensor, placement: Placement = REPLICATED) -> "ShardedTensor":
        """Return the rank's local `tensor` as the part of the whole that `placement` gives."""
        views = [ShardPart(whole(tensor.shape), tensor.detach())]
        return _cut(name, views, tensor.shape, placement)

    @classmethod
    def of_range(
        cls,
        name: str,
        flat: Tensor,
        *,
        start: int,
        local_shape: Sequence[int],
        placement: Placement = REPLICATED,
    ) -> "ShardedTensor":
        """Return elements [start, start + n) of the row-major local tensor of `local_shape`.

        For optimizer state that is sharded over the data-parallel ranks; whole rows are the case
        where start and n are multiples of a row. `flat` is one-dimensional and contiguous.
        """
        stop = start + flat.numel()
        inside = flat.dim() == 1 and flat.is_contiguous() and 0 <= start <= stop
        assert inside and stop <= math.prod(local_shape), name  # noqa: S101, PT018  # invariant: callers cut by shape
        views, done = [], 0
        for box in flat_boxes(tuple(local_shape), start, stop):
            views.append(ShardPart(box, flat.detach()[done : done + box.size].view(box.shape)))
            done += box.size
        if not views:  # an empty share still gives the tensor's name, shape and dtype
            return _cut(name, [], local_shape, placement, dtype=flat.dtype)
        return _cut(name, views, local_shape, placement)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the whole tensor that this rank holds."""
        return tuple(part.box for part in self.parts)

    @property
    def dtype_code(self) -> str:
        """The safetensors name of the element type."""
        return dtype_code_of(self.dtype)

    def zero_padding(self) -> None:
        """Write zeros into the padding rows."""
        for view in self.padding:
            view.zero_()


def _cut(
    name: str,
    views: Sequence[ShardPart],
    local_shape: Sequence[int],
    placement: Placement,
    dtype: torch.dtype | None = None,
) -> ShardedTensor:
    """Move `views` (boxes of the local tensor) to global boxes, and remove the padding rows."""
    padded = partitions.global_shape(local_shape, placement.partition, placement.size)
    shape = padded
    if placement.true_rows is not None:
        assert placement.true_rows <= padded[0], name  # noqa: S101  # invariant: padding only adds
        shape = (placement.true_rows, *padded[1:])
    parts, padding = [], []
    for piece in partitions.pieces(padded, placement.partition, placement.index, placement.size):
        local_box, global_box = from_slices(piece.local), from_slices(piece.global_)
        for box, view in views:
            common = overlap(box, local_box)
            if common is None:
                continue
            placed = common.within(local_box).moved(global_box.offset)
            values = view[common.within(box).slices]
            keep = overlap(placed, whole(shape))
            if keep is None:
                padding.append(values)
                continue
            parts.append(ShardPart(keep, values[keep.within(placed).slices]))
            if keep != placed:
                padding.append(values[keep.shape[0] :])
    return ShardedTensor(name, shape, dtype or views[0].view.dtype, tuple(parts), tuple(padding))


class GeneratorStates(NamedTuple):
    """One rank's random states: tensors, and values that JSON can hold, by flat name."""

    tensors: Mapping[str, Tensor]
    values: JsonObject


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The state that one rank saves in one checkpoint.

    `progress` and `scalars` must be equal on all ranks; `config` and `data` are rank 0's. All are
    plain JSON values. `tensors` are views: nothing may change them until the save returns.
    """

    tensors: tuple[ShardedTensor, ...]
    progress: Mapping[str, int]
    config: Mapping[str, JsonObject]
    scalars: JsonObject = field(default_factory=dict)
    generators: GeneratorStates | None = None
    data: Mapping[str, str] = field(default_factory=dict)  # what was read, by the names of files
    validation_loss: float | None = None  # of these weights, where they were evaluated
    model_kind: str | None = None  # `PretrainTask.name`
    arithmetic: Mapping[str, str] = field(default_factory=dict)  # what numbers depend on further

    def by_name(self) -> dict[str, ShardedTensor]:
        """Return the tensors by name; CheckpointError when two have the same."""
        return by_name(self.tensors)


def by_name(tensors: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return `tensors` by name, in order; CheckpointError if two have the same."""
    named = {tensor.name: tensor for tensor in tensors}
    twice = sorted(set(_repeated(tensor.name for tensor in tensors)))
    if twice:
        raise CheckpointError(
            "two tensors of one rank have the same name in the checkpoint",
            found=", ".join(twice),
            fix="give every parameter and every optimizer state a name of its own",
        )
    return named


def _repeated(names: Iterator[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)
