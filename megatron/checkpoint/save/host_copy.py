"""A copy of the data that a rank will write, in host memory that saves reuse.

Pinned where a GPU copies into it. The copy is made at once, so that training may continue; only one
copy exists at a time, and it must be written before the next is made. Allocating memory takes many
times longer than a copy, so it is allocated, and touched, before the first copy.
"""

import copy
import errno
import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from megatron import device
from megatron.checkpoint.files.durable import refuse_if_cancelled
from megatron.checkpoint.sharded import GeneratorStates, ShardPart, Snapshot
from megatron.errors import MachineError
from megatron.ops.cpu_memory import large_pages

_ALIGNMENT = 64  # bytes; of any element type
_BLOCK_BYTES = 4 << 20  # of one copy by a thread; a smaller one needs no thread
_TOUCH_BYTES = 256 << 20  # between two checks whether the memory is still needed


def copied_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of memory that a copy of `snapshot` takes."""
    return sum(_padded(part.view) for tensor in snapshot.tensors for part in tensor.parts)


def memory_taken(size: int) -> int:
    """Return the bytes of host memory that `make_room(size)` takes.

    torch rounds pinned memory up to powers of 2.
    """
    is_pinned = device.current().type == "cuda"
    return 1 << (size - 1).bit_length() if is_pinned and size else size


class HostMemory:
    """Host memory for one copy, reused between copies and never made smaller.

    `threads` copy at the same time where the values are in host memory too.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.threads = 1

    def make_room(self, size: int) -> None:
        """Allocate memory for a copy of `size` bytes, and touch every page of it.

        Raises:
            MachineError: the system refuses it.
            OSError: ECANCELED, when it is no longer needed.
        """
        if self._bytes.numel() >= size:
            return
        self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old memory first
        try:
            if device.current().type == "cuda":
                self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            else:
                self._bytes = _touched(size)
        except (MemoryError, OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno == errno.ECANCELED:
                raise
            raise MachineError(
                "the system gives no host memory for the copy that --async-save writes from",
                found=f"{size:,} bytes wanted: {error}",
                fix="drop --async-save, or spread the run over more hosts",
            ) from error

    def copy_of(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of the snapshot with values in its own memory; complete on return."""
        self.make_room(copied_bytes(snapshot))
        at, tensors = 0, []
        with _Copies(self.threads) as copies:
            for tensor in snapshot.tensors:
                parts = []
                for part in tensor.parts:
                    values = self._at(at, part.view)
                    copies.take(values, part.view)
                    parts.append(ShardPart(part.box, values))
                    at += _padded(part.view)
                tensors.append(replace(tensor, parts=tuple(parts), padding=()))
        device.synchronize()
        return replace(
            snapshot,
            tensors=tuple(tensors),
            generators=_copied(snapshot.generators),
            progress=copy.deepcopy(dict(snapshot.progress)),
            scalars=copy.deepcopy(dict(snapshot.scalars)),
        )

    def _at(self, start: int, like: Tensor) -> Tensor:
        size = like.element_size() * math.prod(like.shape)
        return self._bytes[start : start + size].view(like.dtype).view(like.shape)


class _Copies:
    """Copies under way, in threads if they are large; leaving the `with` block waits for them."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "checkpoint") if threads > 1 else None
        self._pending: list[Future[Tensor]] = []

    def __enter__(self) -> "_Copies":
        return self

    def __exit__(self, *about: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for copied in self._pending:
            copied.result()

    def take(self, target: Tensor, source: Tensor) -> None:
        """Start to copy `source` into `target`, of the same shape; may return before the end."""
        size = target.element_size() * target.numel()
        if self._pool is None or source.device.type != "cpu" or size < _BLOCK_BYTES:
            target.copy_(source, non_blocking=True)
            return
        rows = max(1, target.shape[0] * _BLOCK_BYTES // size)
        for at in range(0, target.shape[0], rows):
            some, of_source = target[at : at + rows], source[at : at + rows]
            self._pending.append(self._pool.submit(some.copy_, of_source))


def _touched(size: int) -> Tensor:
    """Allocate memory, in large pages if possible: the system provides them many times faster."""
    found = large_pages(size)
    for at in range(0, size, _TOUCH_BYTES):
        refuse_if_cancelled()
        found[at : at + _TOUCH_BYTES].zero_()
    return found


def _padded(view: Tensor) -> int:
    return -(-view.element_size() * view.numel() // _ALIGNMENT) * _ALIGNMENT


def _copied(states: GeneratorStates | None) -> GeneratorStates | None:
    if states is None:
        return None
    tensors = {name: tensor.clone() for name, tensor in states.tensors.items()}
    return GeneratorStates(tensors, copy.deepcopy(dict(states.values)))
