"""Keys and values of the tokens that a generation has seen, allocated once and filled in place.

The index in the cache is the position of the token, for every row alone, so prompts of unequal
length need no padding on the left: what lies beyond a row's own position is masked, and is
overwritten as the row grows.
"""

import math

import torch
from torch import Tensor

from megatron.device import free_memory_bytes
from megatron.errors import MachineError
from megatron.host import in_gib


class KVCache:
    """Room for `capacity` tokens in each of `batch` rows; owned by one request.

    `length` is how many positions may hold something, the same for all rows; a row's own length
    is known only by its position ids.

    Raises:
        MachineError: it is larger than the memory that is free.
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        groups: int,
        capacity: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, batch, groups, capacity, head_width)  # [layers, b, g/tp, capacity, d]
        _refuse_too_large(cache_bytes(*shape, dtype), batch=batch, capacity=capacity)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0
        self._rows = torch.arange(batch, device=device)

    @property
    def capacity(self) -> int:
        """Number of positions that fit."""
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def keep_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the first s positions of every row; keys and values are [b, g/tp, s, d]."""
        length = keys.shape[2]
        self.keys[layer, :, :, :length] = keys
        self.values[layer, :, :, :length] = values

    def extend(
        self, layer: int, keys: Tensor, values: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one token per row at its position, and return everything stored so far.

        Args:
            keys, values: [b, g/tp, 1, d].
            positions: [b, 1], each below `length`.

        Returns:
            Keys and values [b, g/tp, length, d]; a row's are valid up to its own position.
        """
        at = positions[:, 0]
        self.keys[layer][self._rows, :, at] = keys[:, :, 0]
        self.values[layer][self._rows, :, at] = values[:, :, 0]
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]


def cache_bytes(
    layers: int, batch: int, groups: int, capacity: int, head_width: int, dtype: torch.dtype
) -> int:
    """Return 2 x layers x batch x groups/tp x capacity x head width x bytes per element."""
    return 2 * math.prod((layers, batch, groups, capacity, head_width)) * dtype.itemsize


def _refuse_too_large(size: int, *, batch: int, capacity: int) -> None:
    # The system gives memory out before it is there: without this the run ends when it is filled.
    free = free_memory_bytes()
    if free is None or size <= free:
        return
    rows = batch * free // size
    raise MachineError(
        "the keys and values of a generation do not fit into memory",
        found=f"{batch} rows of {capacity} tokens take {in_gib(size)}; {in_gib(free)} are free",
        fix=f"generate for at most {rows} rows at a time"
        if rows
        else f"generate at most {capacity * free // (size // batch)} tokens with their prompt",
    )
