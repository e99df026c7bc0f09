"""Keys and values in blocks of a pool: how many blocks fit, and reading and writing them.

A sequence has a table of blocks, so that sequences grow without moving and share what they have in
common. Slots of a block that nothing was written to hold zeros: what a masked key is multiplied by
zero with has to be finite, whatever sequence had the block before.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.errors import MachineError, first_line
from megatron.host import in_gib
from megatron.scheduling.forward_plan import SequenceSlice

BLOCK_SIZE = 32  # tokens; sizes from 16 to 128 take the same time on CPUs


class PagedCache:
    """A pool of blocks, [layers, 2, blocks + 1, block size, g/tp, d], of keys and of values.

    The last block is never written: it pads tables of sequences that are read together.

    Args:
        first_layer: the number of its first layer in the model.

    Raises:
        MachineError: (in the constructor) the memory is not there.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        groups: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
        first_layer: int = 0,
    ) -> None:
        self.blocks, self.block_size, self.first_layer = blocks, block_size, first_layer
        shape = (layers, 2, blocks + 1, block_size, groups, head_width)
        # Zeros of the system: pages are taken when they are first written.
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self.pool.unbind(0)
        self._halves = [layer.unbind(0) for layer in self._layers]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._halves]
        self._room = self.pool.new_empty((2, 0, *shape[3:]))

    @property
    def null_block(self) -> int:
        """The block of zeros."""
        return self.blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, also while its memory is given back."""
        return self.pool.nbytes

    def layer(self, layer: int) -> Tensor:
        """Return the blocks of keys and of values of a layer, [2, blocks + 1, block size, g/tp, d].

        A kernel may use blocks in an order of its own, if nothing else reads and writes them.
        """
        return self._layers[layer - self.first_layer]

    def slots(self, slices: Sequence[SequenceSlice]) -> list[int]:
        """Return the slots of all tokens of slices: block x block size + offset."""
        size = self.block_size
        return [
            each.blocks[at // size] * size + at % size
            for each in slices
            for at in range(each.start, each.end)
        ]

    def saved(self, blocks: Sequence[int]) -> Tensor:
        """Return a copy of blocks in host memory, [layers, 2, n, block size, g/tp, d]."""
        at = torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)
        return self.pool.index_select(2, at).cpu()

    def release(self) -> None:
        """Give the memory of the pool back; nothing may be read or written until `restore`."""
        self.pool.untyped_storage().resize_(0)

    def restore(self, blocks: Sequence[int] = (), saved: Tensor | None = None) -> None:
        """Take the memory of the pool again, with `saved` in `blocks`.

        Raises:
            MachineError: it is not there.
        """
        try:
            self.pool.untyped_storage().resize_(self.num_bytes)
        except RuntimeError as error:
            raise MachineError(
                "the memory of the keys and values is not there any more",
                found=f"{in_gib(self.num_bytes)}: {first_line(error)}",
                fix="free memory, and resume again",
            ) from error
        # All others are cleared before they are written.
        self.pool[:, :, self.null_block].zero_()
        if saved is not None:
            at = torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)
            self.pool.index_copy_(2, at, saved.to(self.pool.device))

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [t, g/tp, d] at int64 `slots` [t]: block x block size + offset."""
        of_keys, of_values = self._slots[layer - self.first_layer]
        of_keys.index_copy_(0, slots, keys)
        of_values.index_copy_(0, slots, values)

    def reserve(self, blocks: int) -> None:
        """Make `room` for so many blocks, in place of the one before if that is smaller."""
        if self._room.shape[1] < blocks:
            with torch.inference_mode(False):  # it outlives the pass
                self._room = self.pool.new_empty((2, blocks, *self.pool.shape[3:]))

    def room(self, blocks: int) -> Tensor:
        """Return memory for keys and values of so many blocks, [2, n, block size, g/tp, d].

        All calls return the same: a new buffer for each read would be mapped and cleared by the
        system, which takes longer than the copy.
        """
        return self._room[:, :blocks]

    def read(self, layer: int, blocks: Tensor, room: Tensor) -> None:
        """Copy keys and values of int64 `blocks` [n] into a `room` of as many."""
        of_keys, of_values = self._halves[layer - self.first_layer]
        torch.index_select(of_keys, 0, blocks, out=room[0])
        torch.index_select(of_values, 0, blocks, out=room[1])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers, as their contents were before the call."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.pool.device).unbind(1)
            self.pool.index_copy_(2, targets, self.pool.index_select(2, sources))

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in all layers, before a sequence begins to write them."""
        if blocks:
            self.pool.index_fill_(2, torch.tensor(blocks, device=self.pool.device), 0.0)


def block_bytes(
    layers: int, groups: int, head_width: int, dtype: torch.dtype, block_size: int = BLOCK_SIZE
) -> int:
    """Return 2 x layers x block size x groups/tp x head width x bytes per element."""
    return 2 * math.prod((layers, block_size, groups, head_width)) * dtype.itemsize


def blocks_for(tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks that hold the keys of `tokens` tokens."""
    return -(-tokens // block_size)


def check_blocks_fit(blocks: int, bytes_of_one: int, free: int | None, *, what: str) -> None:
    """Check that `blocks` fit into the free bytes of this rank; None: those are unknown.

    The system gives memory out before it is there: without this a run ends when it is filled.

    Args:
        what: whose keys and values they are, for the message.

    Raises:
        MachineError: they do not fit.
    """
    if free is None or blocks * bytes_of_one <= free:
        return
    raise MachineError(
        f"the keys and values of {what} do not fit into memory",
        found=f"{blocks} blocks take {in_gib(blocks * bytes_of_one)}; {in_gib(free)} are free",
        fix=f"use at most {free // bytes_of_one} blocks: fewer or shorter sequences at a time",
    )
