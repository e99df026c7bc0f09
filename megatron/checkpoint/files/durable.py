"""Durable files: write, flush, fsync, close, and only then rename.

Any error on the way is a failed write; after a failed fsync the same descriptor is never tried
again, because a second fsync may report success for data that is lost. Digests are of the bytes
passed to `write`, not of bytes read back.
"""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import xxhash

from megatron import atomic
from megatron.errors import CheckpointError

_AHEAD_BYTES = 32 << 20  # written since the last request to write to the disk

# Set to end a thread that writes in the background early.
CANCELLED: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


def refuse_if_cancelled() -> None:
    """Raise OSError (ECANCELED) if the write of this thread has been cancelled."""
    cancelled = CANCELLED.get()
    if cancelled is not None and cancelled.is_set():
        raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))


class DurableFile:
    """A new file that is written once from start to end and is durable after `close`.

    Leaving the `with` block by an exception closes the file, which is then not durable. The kernel
    is asked to write pages early, so that fsync does not have to wait for all of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = xxhash.xxh3_128()
        self._file: BinaryIO = open(path, "xb", buffering=0)  # noqa: SIM115
        self.bytes = 0
        self._begun = 0  # bytes whose writing to the disk was requested

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        refuse_if_cancelled()
        view = memoryview(data).cast("B")
        self._hash.update(view)
        with _add_file_name(self._path):
            while view:
                done = self._file.write(view)  # unbuffered: may take only a part
                view = view[done:]
                self.bytes += done
            if self.bytes - self._begun >= _AHEAD_BYTES:
                # Linux takes it as: write these pages, and those that are written are not needed.
                fresh = self.bytes - self._begun
                os.posix_fadvise(self._file.fileno(), self._begun, fresh, os.POSIX_FADV_DONTNEED)
                self._begun = self.bytes

    @property
    def xxh3(self) -> str:
        """The xxh3-128 digest of everything written so far, in hexadecimal."""
        return str(self._hash.hexdigest())

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file, _add_file_name(self._path):
            if kind is None:
                os.fsync(self._file.fileno())


@contextmanager
def _add_file_name(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system, which hold only a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Make a new durable file with `data` in it."""
    with DurableFile(path) as file:
        file.write(data)


def replace_file(path: Path, data: bytes, *, suffix: str) -> None:
    """Put `data` at `path` so that a reader sees the old content or the new, never a part."""
    beside = path.with_name(f".{path.name}.{suffix}")
    try:
        write_file(beside, data)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    atomic.sync_directory(path.parent)


_FIXES = {
    errno.ENOSPC: "free space there, or save to another disk",
    errno.EDQUOT: "free space within your quota, or save to another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or save to another file system",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EROFS: "mount it writable, or use another folder",
    errno.EIO: "the disk fails: use another one",
    errno.ENOENT: "make sure that it is on a file system that every rank sees",
}


_FIXES_OF_OBJECTS = {
    errno.EACCES: "give credentials that may list, read, write and delete there, where the "
    "library looks for them (for s3: the environment or ~/.aws)",
    errno.ENOENT: "make the bucket first, and check the address",
}


def from_os_error(error: OSError, doing: str) -> CheckpointError:
    """Return an error with a fix for a failed operation of the operating system."""
    name = errno.errorcode.get(error.errno or 0, "?")
    if "://" in str(error.filename):  # a store of objects, not a disk
        return CheckpointError(
            f"{doing} failed: {error.strerror or error}",
            found=f"{name} at {error.filename}",
            fix=_FIXES_OF_OBJECTS.get(
                error.errno or 0, "see that the store works and has room, and start again"
            ),
        )
    return CheckpointError(
        f"{doing} failed: {error.strerror or error}",
        found=f"{name} at {error.filename or 'a file that was being written'}",
        fix=_FIXES.get(error.errno or 0, "see what the system says about that path"),
    )
