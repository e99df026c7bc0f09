"""Folders with no room, or none behind it, or closed: for real where this process may mount one.

Root writes whatever permissions say, so only a file system of its own stops it. Where mounting is
not allowed the caller's stand-in serves, so that no test is skipped.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

THIN_POOL_MIB, THIN_DISK_MIB = 8, 64
# Of the image no more is written than has to be, so that its room is still to be found.
_NOTHING_BEFOREHAND = ("-q", "-F", "-E", "nodiscard,lazy_itable_init=1", "-O", "^has_journal")


@contextmanager
def small_disk(folder: Path, *, kib: int, otherwise: Callable[[], None]) -> Iterator[Path]:
    """`folder` as a disk of so many KiB; where that cannot be, `otherwise()` is called first."""
    folder.mkdir(parents=True, exist_ok=True)
    if not _mount(folder, f"size={kib}k"):
        otherwise()
        yield folder
        return
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


@contextmanager
def read_only(folder: Path, *, otherwise: Callable[[], None]) -> Iterator[Path]:
    """`folder` with what is in it, closed to writers inside of the `with` block."""
    if os.geteuid() != 0:
        mode = folder.stat().st_mode
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(mode)
        return
    if not _run("mount", "--bind", str(folder), str(folder)):
        otherwise()
        yield folder
        return
    try:
        if not _run("mount", "-o", "remount,bind,ro", str(folder)):
            otherwise()
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


class ThinDisk(NamedTuple):
    """A disk that reports more room than it has, as thin volumes and quotas of others do.

    While the `pool` behind it has room it is a disk like any other. After `use_up` every write
    still succeeds, in memory; fsync alone says that nothing was stored: ENOSPC, then EIO, and then
    nothing any more.
    """

    folder: Path
    pool: Path

    @property
    def image(self) -> Path:
        """What the disk has stored."""
        return self.pool / "image"

    def use_up(self) -> None:
        """Fill the pool, as a neighbour on it would; what was stored before stays."""
        _must("sync", "--file-system", str(self.folder))
        with (
            open(self.pool / "neighbour", "ab", buffering=0) as file,
            suppress(OSError),  # it is full
        ):
            while True:
                file.write(bytes(4096))

    def remount(self) -> None:
        """Forget what is in memory alone: what is left is what the disk has stored."""
        _must("umount", str(self.folder))
        _must("mount", "-o", "loop", str(self.image), str(self.folder))


@contextmanager
def thin_disk(folder: Path, pool: Path) -> Iterator[ThinDisk | None]:
    """`folder` as a disk of 64 MiB on a `pool` of 8; None where this process may mount none.

    ext4 in a sparse image on a tmpfs, by a loop device. Both are gone after the `with` block.
    """
    folder.mkdir(parents=True)
    pool.mkdir(parents=True)
    disk = ThinDisk(folder, pool)
    with ExitStack() as mounted:
        if _mount(pool, f"size={THIN_POOL_MIB}m"):
            mounted.callback(_unmount, pool)
            with open(disk.image, "wb") as file:
                file.truncate(THIN_DISK_MIB << 20)
            if _run("mkfs.ext4", *_NOTHING_BEFOREHAND, str(disk.image)) and _run(
                "mount", "-o", "loop", str(disk.image), str(folder)
            ):
                mounted.callback(_unmount, folder)
                yield disk
                return
        yield None


def _unmount(folder: Path) -> None:
    """Whatever still holds a file there (of a test that failed) must not keep the mount."""
    if not _run("umount", str(folder)):
        _must("umount", "--lazy", str(folder))


def _must(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, check=False, timeout=30, text=True)
    assert not ended.returncode, f"{' '.join(words)}: {ended.stderr}"


def _mount(folder: Path, options: str) -> bool:
    return os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:  # no such program
        return False
