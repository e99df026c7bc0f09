"""State of the optimizer that waits in host memory, and comes to the device for an update.

The state comes in parts, is updated there by the kernels that update what stays, and goes back: an
update is the same to the bit, and the device has room for a few parts only. A part is so many
elements, whichever tensors they are of, since each element is updated by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import device

_PART_BYTES = 64 << 20  # of state: a copy takes far longer than its start, and rooms stay small
_GRAIN = 16  # elements, of which a room has whole ones: 32 bytes in the narrowest dtype
_WIDEST = 3 * 8  # bytes of an element: a weight and two means, in float64
_BLOCK_BYTES = 256 << 20  # of host memory, which is rounded up to a power of two where it is pinned


class Piece(NamedTuple):
    """The elements [start, stop) of the tensors of parameter number `at`."""

    at: int
    start: int
    stop: int


def parts_of(sizes: Sequence[int], largest: int) -> Iterator[tuple[Piece, ...]]:
    """Cut tensors of so many elements into parts of at most `largest` elements, in order.

    Args:
        largest: a multiple of 16, of which each piece takes a multiple.
    """
    part: list[Piece] = []
    room = largest
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            part.append(Piece(index, start, stop))
            room -= -(-(stop - start) // _GRAIN) * _GRAIN
            start = stop
            if not room:
                yield tuple(part)
                part, room = [], largest
    if part:
        yield tuple(part)


def first_share(sizes: Sequence[int], fraction: float) -> int:
    """Return of how many tensors, from the first on, the sizes add up to `fraction` of all at most.

    Of a fraction of 1 all of them.
    """
    total, taken = sum(sizes), 0
    for count, size in enumerate(sizes):
        taken += size
        if taken > fraction * total:
            return count
    return len(sizes)


@dataclass(slots=True)
class _Block:
    memory: Tensor  # bytes
    used: int = 0


class HostState:
    """Memory of the host for state, and the way to the device and back."""

    def __init__(self, *, part_bytes: int = _PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._blocks: list[_Block] = []
        self._trip: device.RoundTrip | None = None

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in host memory, for the whole run."""
        room = -(-tensor.nbytes // 64) * 64
        if not self._blocks or self._blocks[-1].used + room > len(self._blocks[-1].memory):
            memory = device.host_empty(max(room, _BLOCK_BYTES), torch.uint8)
            self._blocks.append(_Block(memory))
        block = self._blocks[-1]
        kept = block.memory[block.used : block.used + tensor.nbytes].view(tensor.dtype)
        block.used += room
        kept = kept.view(tensor.shape)
        kept.copy_(tensor)
        return kept

    def parts(self, tensors: Sequence[Sequence[Tensor]]) -> Iterator["HostPart"]:
        """Yield parts of the tensors of several parameters, in order, with what is of them there.

        After each the values there are the new ones, and go back.

        Args:
            tensors: of each parameter its tensors in host memory, contiguous and of one size; their
                dtypes are those of every parameter.
        """
        if not tensors:
            return
        each = sum(tensor.itemsize for tensor in tensors[0])
        largest = max(1, self._part_bytes // (each * _GRAIN)) * _GRAIN
        sizes = [of_one[0].numel() for of_one in tensors]
        if self._trip is None:
            self._trip = device.RoundTrip(max(self._part_bytes, _GRAIN * _WIDEST))
        with self._trip:
            for pieces in parts_of(sizes, largest):
                flat = [
                    tensor.view(-1)[start:stop]
                    for index, start, stop in pieces
                    for tensor in tensors[index]
                ]
                there = iter(self._trip.there(flat))
                kinds = len(tensors[0])
                yield HostPart(pieces, [[next(there) for _ in range(kinds)] for _ in pieces])
                self._trip.back()

    def settle(self) -> None:
        """Wait until all new values are in host memory, for who reads it."""
        if self._trip is not None:
            self._trip.settle()


class HostPart(NamedTuple):
    """Elements of some parameters, and of each its tensors on the device."""

    pieces: tuple[Piece, ...]
    tensors: list[list[Tensor]]
