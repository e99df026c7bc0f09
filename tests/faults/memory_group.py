"""A cgroup with a small limit, in which the kernel kills a rank that takes more memory.

What a reader would get wrong: a process that joins a group leaves what it has to the group that it
came from, so the limit holds for what it takes afterwards. In v2 no group with processes of its own
can limit others, so the nearest one around it does.
"""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron import host

_LIMIT = 64 * 2**20
# Of v1 and v2, in the order in which they can be written: without swap, since that delays the end.
_LIMITS = {
    "memory.limit_in_bytes": _LIMIT,
    "memory.memsw.limit_in_bytes": _LIMIT,
    "memory.max": _LIMIT,
    "memory.swap.max": 0,
}
_REMOVAL_S = 5.0  # for the kernel to let go of processes that have ended


def parent_of_groups() -> Path | None:
    """Return the nearest group in which groups with limits can be made; None where none can be."""
    for folder in host.cgroup_folders("memory") if os.geteuid() == 0 else ():
        delegated = folder / "cgroup.subtree_control"
        of_v2 = delegated.exists() and "memory" in delegated.read_text().split()
        if os.access(folder, os.W_OK) and (of_v2 or (folder / "memory.limit_in_bytes").exists()):
            return folder
    return None


@contextmanager
def limited_group(run: Path) -> Iterator[None]:
    """Make the group of a run, and remove it afterwards.

    Raises:
        OSError: the kernel refuses a limit, or processes are still in the group at the end.
    """
    group = _group_of(run)
    group.mkdir()
    try:
        for name, limit in _LIMITS.items():
            if (group / name).exists():
                (group / name).write_text(str(limit))
        yield
    finally:
        _remove(group)


def join_and_fill(run: Path) -> None:
    """Join the group of a run, and write to twice the memory that it may have."""
    (_group_of(run) / "cgroup.procs").write_text(str(os.getpid()))
    pages = mmap.mmap(-1, 2 * _LIMIT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, len(pages), mmap.PAGESIZE):
        pages[at] = 1


def _group_of(run: Path) -> Path:
    parent = parent_of_groups()
    assert parent is not None  # cells that need one are left out
    return parent / f"{run.parent.name}-{run.name}"


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while True:
        try:
            return group.rmdir()  # which removes a group's files with it
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
