"""Memory in large pages, where the system has them.

A CPU keeps few addresses of pages: what is read once in every step, such as weights, waits for an
address at each page of 4 KiB. Linux gives pages of 2 MiB to memory that asks for them, if it is
allowed to (/sys/kernel/mm/transparent_hugepage/enabled is madvise or always).
"""

import contextlib
import mmap

import torch
from torch import Tensor

_CHUNK = 1 << 26  # bytes that are asked for at a time; the system takes what is used
_ALIGNMENT = 64  # bytes of a line of the caches


def large_pages(size: int) -> Tensor:
    """Return uint8 [size], zeros, in large pages if possible.

    Raises:
        OSError: the system gives no memory.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux's
        with contextlib.suppress(OSError):  # advice: a kernel without large pages has small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class CopiesInLargePages:
    """Copies of tensors of the CPU, one after the other."""

    def __init__(self) -> None:
        self._chunk = large_pages(0)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        if self._used + tensor.nbytes > len(self._chunk):
            self._chunk, self._used = large_pages(max(_CHUNK, tensor.nbytes)), 0
        own = self._chunk[self._used : self._used + tensor.nbytes]
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)
