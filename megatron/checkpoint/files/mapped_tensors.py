"""Tensors that stay in files: mapped into memory, read when they are needed, dropped afterwards.

A file that is cut under a mapping ends the process with SIGBUS: pages are brought by a call that
reports it, and files are looked at before each use. Only a cut during a use is no error.
"""

import ctypes
import errno
import mmap
import os
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files.safetensors_header import ALIGNMENT
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.errors import CheckpointError

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which the module `mmap` does not name
_SAMPLE_BYTES = 32 << 20  # that are read to measure a disk
_BLOCK_BYTES = 4 << 20


class TensorRange(NamedTuple):
    """A whole tensor, row-major: bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int
    dtype_code: str
    shape: tuple[int, ...]

    @property
    def is_aligned(self) -> bool:
        """Whether it begins where a tensor in memory would, in a mapping of the file.

        Sums of MKL depend on it, on CPUs without AVX-512.
        """
        return self.start % ALIGNMENT == 0


class MappedFile:
    """One file mapped as a whole; it stays open as long as tensors of it are used.

    The mapping is read-only, so that it counts as a file and not as memory that this process asks
    for, whatever its size.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._stamp = _stamp(os.fstat(file.fileno()))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor).atexit = False
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise _changed(path, str(error)) from error
        with warnings.catch_warnings():
            # Tensors that cannot be written: nothing writes to weights in inference.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, of: TensorRange) -> Tensor:
        """Return a read-only view; `of` lies in this file and is aligned."""
        return _as_described(self._bytes[of.start : of.stop], of)

    def read(self, of: TensorRange) -> Tensor:
        """Return a copy of a tensor of this file, in pages that go when it does.

        Raises:
            CheckpointError: the disk cannot read it, or the file is shorter.
        """
        room = mmap.mmap(-1, max(1, of.stop - of.start))
        target, at = memoryview(room)[: of.stop - of.start], 0
        while at < len(target):
            try:
                count = os.preadv(self._descriptor, [target[at:]], of.start + at)
            except OSError as error:
                raise _changed(self.path, str(error)) from error
            if not count:
                raise _changed(self.path, f"it ends before byte {of.stop}")
            at += count
        return _as_described(torch.frombuffer(room, dtype=torch.uint8)[: len(target)], of)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file has changed since it was opened."""
        if (found := _stamp(os.fstat(self._descriptor))) != self._stamp:
            raise _changed(self.path, f"{self._stamp[0]} bytes before, {found[0]} now")

    def bring(self, start: int, stop: int) -> None:
        """Read bytes [start, stop) into memory, if they are not there, and wait for it.

        Raises:
            CheckpointError: the disk cannot read them, or the file is shorter.
        """
        code = self._advise(start, stop, _POPULATE_READ)
        if code == errno.EINVAL:  # an older kernel: pages come when they are used
            os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
        elif code:
            raise _changed(self.path, f"{os.strerror(code)} at bytes {start} to {stop}")

    def drop(self, start: int, stop: int) -> None:
        """Take bytes [start, stop) out of this process; the kernel keeps them while it has room."""
        self._advise(start, stop, mmap.MADV_DONTNEED)

    def _advise(self, start: int, stop: int, advice: int) -> int:
        """Call madvise(2) on whole pages, without the interpreter's lock; return errno."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(self._bytes.data_ptr() + first)
        if not _LIBC.madvise(address, ctypes.c_size_t(stop - first), ctypes.c_int(advice)):
            return 0
        return ctypes.get_errno()


_LIBC = ctypes.CDLL(None, use_errno=True)


class MappedTensors:
    """Tensors of one layer in any number of files.

    Args:
        files: those that are open already, by path; this opens and adds what it needs.
    """

    def __init__(self, ranges: Sequence[TensorRange], files: dict[Path, MappedFile]) -> None:
        for each in ranges:
            if each.path not in files:
                files[each.path] = MappedFile(each.path)
        self._parts = [(files[each.path], each) for each in ranges]
        self._files = {file for file, _ in self._parts}
        self._tensors: list[Tensor | None] = [
            file.tensor(each) if each.is_aligned else None for file, each in self._parts
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors; what is not in memory is read: pages when they are used.

        Raises:
            CheckpointError: a file has changed, is shorter, or cannot be read.
        """
        for file in self._files:
            file.check_unchanged()
        return [self._tensor(at) for at in range(len(self._parts))]

    def bring(self) -> None:
        """Read all of them into memory, if they are not there, and wait for it.

        Raises:
            CheckpointError: a file has changed, is shorter, or cannot be read.
        """
        for file in self._files:
            file.check_unchanged()
        for at, (file, each) in enumerate(self._parts):
            if each.is_aligned:
                file.bring(each.start, each.stop)
            else:
                self._tensor(at)

    def drop(self) -> None:
        """Take them out of this process."""
        for at, (file, each) in enumerate(self._parts):
            if each.is_aligned:
                file.drop(each.start, each.stop)
            else:
                self._tensors[at] = None

    def _tensor(self, at: int) -> Tensor:
        found = self._tensors[at]
        if found is None:
            file, each = self._parts[at]
            found = self._tensors[at] = file.read(each)
        return found


def _as_described(data: Tensor, of: TensorRange) -> Tensor:
    return data.view(dtype_of(of.dtype_code)).view(of.shape)


def read_rate(path: Path) -> float | None:
    """Return bytes per second of reading the first part of a file from its disk.

    None if the file cannot be read. The kernel is asked to forget those pages first; what a disk
    keeps itself counts as read from it.
    """
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, _SAMPLE_BYTES, os.POSIX_FADV_DONTNEED)
            done, began = 0, time.perf_counter()
            while done < _SAMPLE_BYTES and (block := file.read(_BLOCK_BYTES)):
                done += len(block)
            took = time.perf_counter() - began
    except OSError:
        return None
    return done / took if done and took > 0 else None


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _changed(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "a file with weights that stay on the disk changed or cannot be read",
        found=f"{path}: {found}",
        fix="see that nothing writes there and that the disk works, and start again",
    )
