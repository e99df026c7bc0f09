"""Boxes of a tensor's index space: overlap, flat ranges as boxes, exact tiling. Pure arithmetic.

All decisions about which bytes go where use this module. A box of a zero-dimensional tensor is
`Box((), ())` and holds one element.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The indices `offset[i] <= x[i] < offset[i] + shape[i]` of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into its tensor."""
        return tuple(slice(start, start + length) for start, length in zip(*self))

    def within(self, outer: "Box") -> "Box":
        """Return the box relative to the first corner of `outer`, which contains it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset)), self.shape)

    def moved(self, origin: Sequence[int]) -> "Box":
        """Return the box shifted by `origin`; undoes `within`."""
        return Box(tuple(a + b for a, b in zip(self.offset, origin)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of every index of a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def from_slices(slices: Sequence[slice]) -> Box:
    """Return the box that unit-step `slices` with explicit bounds stand for."""
    return Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))


def overlap(a: Box, b: Box) -> Box | None:
    """Return the elements that `a` and `b` have in common; None when there are none."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset))
    stop = tuple(min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape))
    shape = tuple(end - start for start, end in zip(offset, stop))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes of elements [start, stop) of a row-major tensor of `shape`, in flat order.

    Each is itself a contiguous flat range: a partial row, whole rows, a partial row, at every
    depth, which makes at most 2 n - 1 boxes for n dimensions.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, flat_boxes(inner, head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, flat_boxes(inner, head, row))
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    return boxes + _in_row(last, flat_boxes(inner, 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.shape)) for box in boxes]


def tiling_fault(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Return why `boxes` do not hold every element of `shape` exactly once; None when they do."""
    outer = whole(shape)
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"{format_box(box)} has another number of dimensions than {tuple(shape)}"
        if box.size and overlap(box, outer) != box:
            return f"{format_box(box)} reaches outside {tuple(shape)}"
    clash = _first_overlap(boxes)
    if clash is not None:
        return f"{format_box(clash[0])} and {format_box(clash[1])} overlap"
    total = sum(box.size for box in boxes)
    if total != outer.size:
        return f"{total} of {outer.size} elements are there"
    return None


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, or None.

    Sweeps along dimension 0, along which most tensors are cut, so few pairs are compared.
    """
    live: list[Box] = []
    for box in sorted(box for box in boxes if box.size):
        live = [b for b in live if not box.offset or b.offset[0] + b.shape[0] > box.offset[0]]
        for other in live:
            if overlap(box, other) is not None:
                return other, box
        live.append(box)
    return None


def format_box(box: Box) -> str:
    """Return the box as Python would index it: `[0:64, 32:48]`."""
    return "[" + ", ".join(f"{s.start}:{s.stop}" for s in box.slices) + "]"
