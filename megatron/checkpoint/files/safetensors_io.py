"""Tensors to and from safetensors files, a bounded block at a time, digested while written.

Writing needs no second copy of the data. Reading touches only the requested rows, and fills the
target directly if its layout in host memory is that of the file. Neither holds more than one block
(or one row, where that is larger). Headers and their validation live in `safetensors_header`.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_header as headers
from megatron.checkpoint.files.store import NewFile, Place, create, read_at
from megatron.errors import CheckpointError

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BLOCK_BYTES = 8 << 20


class Written(NamedTuple):
    """Sizes and digests of what was written: the whole file, and each tensor's data in order."""

    bytes: int
    xxh3: str
    tensors_xxh3: tuple[str, ...]


def dtype_code_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype; CheckpointError when the format has none."""
    if dtype not in _CODES:
        raise CheckpointError(
            "a tensor has an element type that checkpoints cannot hold",
            found=str(dtype),
            fix=f"convert it to one of {', '.join(sorted(_CODES.values()))}",
        )
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Return the torch dtype that a safetensors name stands for."""
    return _DTYPES[code]


def write(
    path: Place,
    tensors: Sequence[tuple[str, Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write named tensors to a new durable file; larger element types should come first.

    Raises:
        OSError: the file exists, or the disk refused; the part written is left behind.
    """
    described = [(name, dtype_code_of(tensor.dtype), tensor.shape) for name, tensor in tensors]
    return write_stream(path, described, [tensor for _, tensor in tensors], metadata=metadata)


def write_stream(
    path: Place,
    described: Sequence[tuple[str, str, Sequence[int]]],
    tensors: Iterable[Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors made one at a time; `described` gives (name, dtype code, shape) beforehand.

    Raises:
        OSError: as `write`.
        CheckpointError: a tensor is not what was described.
    """

    def fill(file: NewFile) -> tuple[str, ...]:
        digests, buffer = [], _BlockBuffer()
        file.write(headers.encode(described, metadata or {}))
        for (name, code, shape), tensor in zip(described, tensors, strict=True):
            if dtype_code_of(tensor.dtype) != code or tuple(tensor.shape) != tuple(shape):
                raise CheckpointError(
                    "a tensor differs from what its checkpoint's manifest describes",
                    found=f"{name}: {dtype_code_of(tensor.dtype)} {list(tensor.shape)}, expected "
                    f"{code} {list(shape)}",
                    fix="the checkpoint that it is read from is damaged: copy it again",
                )
            digests.append(_digest(tensor, buffer, file.write))
        return tuple(digests)

    # Tensors that are made one at a time cannot be made again.
    created, digests = create(path, fill, again=not isinstance(tensors, Iterator))
    return Written(created.bytes, created.xxh3, digests)


def digests_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the digests that writing `tensors` would give, as in `Written.tensors_xxh3`."""
    buffer = _BlockBuffer()
    return tuple(_digest(tensor, buffer) for tensor in tensors)


class _BlockBuffer(threading.local):
    """A block of memory per thread, reused: allocating takes longer than the copy itself.

    Pinned where a GPU copies to it or from it.
    """

    _bytes: Tensor | None = None

    def block(self, size: int, *, like: Tensor) -> Tensor:
        """Return `size` bytes for a copy to or from the device of `like`."""
        pinned = like.device.type == "cuda"
        if self._bytes is None or self._bytes.numel() < size or self._bytes.is_pinned() != pinned:
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._bytes[:size]


def _digest(
    tensor: Tensor, buffer: _BlockBuffer, take: Callable[[memoryview], object] | None = None
) -> str:
    """Return the digest of `tensor`, each block of which `take` gets once it is digested."""
    digest = xxhash.xxh3_128()
    for block in _blocks(tensor, buffer):
        digest.update(block)
        if take is not None:
            take(block)
    return str(digest.hexdigest())


def _blocks(tensor: Tensor, buffer: _BlockBuffer) -> Iterator[memoryview]:
    """Yield the row-major bytes of `tensor` block by block, whatever its device and strides."""
    if tensor.numel() == 0:
        return
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row_bytes = max(1, rows.element_size() * math.prod(rows.shape[1:]))
    step = max(1, _BLOCK_BYTES // row_bytes)
    for at in range(0, rows.shape[0], step):
        block = rows[at : at + step]
        if block.device.type != "cpu" or not block.is_contiguous():
            size = block.element_size() * block.numel()
            copied = buffer.block(size, like=block).view(block.dtype).view(block.shape)
            block = copied.copy_(block)
        yield block.view(-1).view(torch.uint8).numpy().data


class Reader:
    """An open safetensors file whose header has been checked against its length.

    Several threads may read from it.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self.header = headers.read(path)
        self._file = path.open("rb", buffering=0)
        self._buffer = _BlockBuffer()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy `box` of the stored tensor into `target`, which has the box's shape.

        `target` may be strided, on a device, or of another dtype.
        """
        entry = self.header.entries[name]
        dtype = _DTYPES[entry.dtype]
        shape, start = entry.shape or (1,), entry.start
        offset, lengths = box.offset or (0,), box.shape or (1,)
        target = target.detach()
        target = target.reshape(1) if target.dim() == 0 else target
        item = headers.ITEM_BYTES[entry.dtype]
        while len(shape) > 1 and lengths[0] == 1:  # one row: its columns are the rows to read
            start += offset[0] * item * math.prod(shape[1:])
            shape, offset, lengths, target = shape[1:], offset[1:], lengths[1:], target[0]
        row_bytes = item * math.prod(shape[1:])
        step = max(1, _BLOCK_BYTES // max(1, row_bytes))
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], lengths[1:]))
        as_stored = target.device.type == "cpu" and target.dtype == dtype
        as_stored = as_stored and target.is_contiguous() and lengths[1:] == shape[1:]
        for done in range(0, lengths[0], step):
            rows = target[done : done + step]
            at, count = start + (offset[0] + done) * row_bytes, rows.shape[0]
            if as_stored:
                self._fill(at, rows.view(-1).view(torch.uint8))
                continue
            data = self._buffer.block(count * row_bytes, like=target)
            self._fill(at, data)
            rows.copy_(data.view(dtype).view(count, *shape[1:])[(slice(None), *columns)])

    def tensor(self, name: str) -> Tensor:
        """Return the whole stored tensor, on the CPU."""
        entry = self.header.entries[name]
        whole = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="cpu")
        if whole.numel():
            self.read_into(name, Box((0,) * len(entry.shape), entry.shape), whole)
        return whole

    def _fill(self, start: int, target: Tensor) -> None:
        """Read the bytes from `start` on into `target`, a contiguous tensor of bytes."""
        view = target.numpy().data
        while view:
            got = read_at(self._file, view, start)
            if not got:
                raise CheckpointError(
                    "a checkpoint file became shorter while it was being read",
                    found=f"{self.path}: nothing at byte {start}",
                    fix="see that no other job writes there, and load again",
                )
            view, start = view[got:], start + got
