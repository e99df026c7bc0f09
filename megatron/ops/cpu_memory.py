"""Memory of tensors on CPUs: without gaps, and in large pages where the system has them.

A CPU keeps few addresses of pages: what is read once in every step, such as weights, waits for an
address at each page of 4 KiB. Linux gives pages of 2 MiB to memory that asks for them, if it is
allowed to (/sys/kernel/mm/transparent_hugepage/enabled is madvise or always).
"""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import log

_CHUNK = 1 << 26  # bytes that are asked for at a time; the system takes what is used
_ALIGNMENT = 64  # bytes of a line of the caches
_LIBRARY = Path(__file__).with_name("_cpu_memory.so")


class TensorMemory(NamedTuple):
    """Bytes of the tensors in the range of `keep_tensors_together`, and up to the last one's end.

    Between them are gaps, whose memory this process keeps.
    """

    in_use: int
    end: int


def keep_tensors_together() -> Callable[[], None]:
    """Place new CPU tensors of 256 KiB and more in one range of memory; return what undoes it.

    The C library puts small objects between large tensors, and the place of a freed one is too
    small for the next of its size: a training's activations took half as much again. Memory of
    freed tensors is kept for others; where it is undone it goes back to the system, and tensors
    that are still there stay what they are. Call it while no other thread makes tensors.

    Without the compiled code (csrc/memory), and where that is for another torch, nothing changes
    but for a warning. Nothing changes either where this is in use already.
    """
    if sys.platform != "linux":
        return _nothing
    library, found = _load(_LIBRARY, torch.__version__)
    if library is None:
        log.warning_once(
            "tensor memory",
            f"megatron/ops/{_LIBRARY.name} {found}; a training on CPUs takes more memory without "
            "it: python setup.py build_ext --inplace builds it",
        )
        return _nothing
    if error := library.megatron_cpu_memory_start():
        log.debug(f"tensors are not kept together: {os.strerror(error)}")
        return _nothing
    return library.megatron_cpu_memory_stop


def tensor_memory() -> TensorMemory:
    """Return what the tensors take that are kept together; zeros without the compiled code."""
    library, _ = _load(_LIBRARY, torch.__version__)
    in_use, end = ctypes.c_size_t(), ctypes.c_size_t()
    if library is not None:
        library.megatron_cpu_memory_sizes(ctypes.byref(in_use), ctypes.byref(end))
    return TensorMemory(in_use.value, end.value)


def _nothing() -> None:
    """There is nothing to undo."""


def _load(path: Path, version: str) -> tuple[ctypes.CDLL | None, str]:
    """Return the library for a version of torch; None and why if there is no such one."""
    if not path.exists():
        return None, "is not built"
    try:
        library = ctypes.CDLL(str(path))
        library.megatron_cpu_memory_torch.restype = ctypes.c_char_p
        built_for = library.megatron_cpu_memory_torch().decode()
        library.megatron_cpu_memory_stop.restype = None
        library.megatron_cpu_memory_sizes.restype = None
    except (OSError, AttributeError) as error:
        return None, f"cannot be used with torch {version}: {error}"
    if built_for != version.partition("+")[0]:
        return None, f"was compiled for torch {built_for}, and this is torch {version}"
    return library, ""


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
