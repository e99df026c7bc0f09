"""Sends the files of a folder to one rank while another folder's arrive from another one.

Blocks of both travel at the same time. What a reader would get wrong: a disk that fails must not
leave a peer waiting, so the messages go on to their end, and the error is raised after them.
"""

import errno
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import device
from megatron.mpu.collectives import exchange
from megatron.mpu.context import Group

BLOCK_BYTES = 32 << 20


class Listed(NamedTuple):
    """A file of a folder."""

    name: str
    bytes: int


class Parcel(NamedTuple):
    """The files of `directory`, to or from the rank `peer`, an index in the group."""

    peer: int
    directory: Path
    files: Sequence[Listed]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


def listing(directory: Path) -> tuple[Listed, ...]:
    """Return the files of a folder, in the order in which they are sent."""
    return tuple(Listed(path.name, path.stat().st_size) for path in sorted(directory.iterdir()))


def exchange_files(sent: Parcel | None, received: Parcel | None, group: Group) -> OSError | None:
    """Send one parcel and receive another one; return the first error of a disk here, if any.

    Both ends of each parcel call this together, with the same files.

    Raises:
        PeerError: a peer is gone.
    """
    with _Files(sent, "r") as source, _Files(received, "x") as target:
        for at in range(0, max(source.bytes, target.bytes), BLOCK_BYTES):
            outgoing = incoming = None
            if sent is not None and at < source.bytes:
                block = source.read(min(BLOCK_BYTES, source.bytes - at))
                outgoing = (block.to(device.current()), sent.peer)
            if received is not None and at < target.bytes:
                size = min(BLOCK_BYTES, target.bytes - at)
                arrives = torch.empty(size, dtype=torch.uint8, device=device.current())
                incoming = (arrives, received.peer)
            exchange(outgoing, incoming, group)
            if incoming is not None:
                target.write(incoming[0].cpu())
    return source.error or target.error


class _Files:
    """The files of a parcel as one stream of bytes; its first error is kept, and ends its work."""

    def __init__(self, parcel: Parcel | None, mode: str) -> None:
        self.bytes = 0 if parcel is None else parcel.bytes
        self.error: OSError | None = None
        self._left = [] if parcel is None else list(parcel.files)
        self._folder = None if parcel is None else parcel.directory
        self._mode = mode
        self._file: FileIO | None = None
        self._to_come = 0  # bytes of the open file

    def __enter__(self) -> "_Files":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, count: int) -> Tensor:
        """Return the next `count` bytes; those that cannot be read are zeros."""
        block = torch.zeros(count, dtype=torch.uint8)
        self._go_through(block.numpy().data, _fill)
        return block

    def write(self, block: Tensor) -> None:
        """Append `block`; not forced to disk, since whoever reads it compares digests."""
        self._go_through(block.numpy().data, _append)

    def _go_through(self, block: memoryview, step: Callable[[FileIO, memoryview], None]) -> None:
        """Call `step` with each file that `block` is a part of, and with that part."""
        try:
            while block and self.error is None:
                if not self._to_come:
                    self._open_next()
                part, block = block[: self._to_come], block[self._to_come :]
                assert self._file is not None  # noqa: S101  # invariant: just opened
                step(self._file, part)
                self._to_come -= len(part)
        except OSError as error:
            self.error = error

    def _open_next(self) -> None:
        if self._file is not None:
            self._file.close()
        assert self._folder is not None  # noqa: S101  # invariant: there are bytes left
        name, self._to_come = self._left.pop(0)
        self._file = FileIO(self._folder / name, self._mode)


def _fill(file: FileIO, part: memoryview) -> None:
    while part:
        count = file.readinto(part)
        if not count:
            raise OSError(errno.EIO, "the file has become shorter", str(file.name))
        part = part[count:]


def _append(file: FileIO, part: memoryview) -> None:
    while part:
        part = part[file.write(part) :]
