"""Folders with no room, or that nobody may write to, for real where this process may mount one.

Root writes whatever permissions say, so only a file system of its own stops it. Where mounting is
not allowed the caller's stand-in serves, so that no test is skipped.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


def _mount(folder: Path, options: str) -> bool:
    return os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
    except OSError:  # no such program
        return False
