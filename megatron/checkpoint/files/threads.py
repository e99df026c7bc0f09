"""One rank's reading, digesting and copying in a few threads, which release the GIL.

None of them communicates. How many there are follows from the cores that ranks of one host share.
"""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from megatron.host import usable_cpus

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS = 4  # more do not speed up a disk or the memory of a host
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # distinguishes containers called "localhost"


def this_host() -> str:
    """Return a name that is equal on ranks that share memory and disks."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def threads_of_this_rank(hosts: Sequence[str], rank: int) -> int:
    """Return the number of threads of `rank` among `hosts`: its part of the cores, at most 4."""
    return max(1, min(_MAX_THREADS, int(usable_cpus()) // hosts.count(hosts[rank])))


def in_threads(step: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return `step` of each item, in order; raises the error of the first that failed.

    With one thread, or one item, the caller's thread runs it.
    """
    if min(threads, len(items)) < 2:
        return [step(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="checkpoint") as pool:
        return list(pool.map(step, items))
