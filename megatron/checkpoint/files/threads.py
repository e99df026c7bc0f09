"""One rank's reading, digesting and copying in a few threads, which let go of Python's lock.

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

_MOST = 4  # as many as a disk or the memory of a host has use for
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells containers called "localhost" apart


def this_host() -> str:
    """Return a name that ranks have in common where they share memory and a view of the disks."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def threads_of_this_rank(hosts: Sequence[str], rank: int) -> int:
    """Threads for `rank` of ranks on `hosts`: its part of the cores, and a few at most."""
    return max(1, min(_MOST, int(usable_cpus()) // hosts.count(hosts[rank])))


def in_threads(step: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """`step` of each item, in order; raises what the first one that failed has raised.

    With one thread, or one item, it is the caller's own.
    """
    if min(threads, len(items)) < 2:
        return [step(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), thread_name_prefix="checkpoint") as pool:
        return list(pool.map(step, items))
