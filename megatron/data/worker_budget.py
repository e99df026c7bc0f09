"""How many data-loader workers this machine carries: affinity, cgroup quota and shared memory.

What a reader would get wrong: a container that may use 4 CPUs still shows all of the host's, and
only its cgroup says so; and loaders work one after the other, so CPUs are counted against the
workers of one loader on every rank of the node, but shared memory against those of all loaders.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron import log

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's workers put finished batches
_BATCHES_PER_WORKER = 2  # torch's prefetch_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What the loaders of one node ask of it."""

    num_workers: int  # of each loader
    loaders: int  # of each rank that reads: training, and each group of validation and test
    readers: int  # ranks of this node that read
    batch_bytes: int  # of one micro-batch

    @property
    def busy_workers(self) -> int:
        """Worker processes that work at the same time on this node."""
        return self.num_workers * self.readers

    @property
    def bytes_in_flight(self) -> int:
        """Shared memory of all batches that workers of all loaders have ready."""
        return self.busy_workers * self.loaders * _BATCHES_PER_WORKER * self.batch_bytes


def announce_worker_budget(load: WorkerLoad) -> None:
    """Warn once when this node has too few CPUs or too little shared memory for `load`."""
    for problem in worker_problems(load, cpus=usable_cpus(), shared_bytes=shared_memory_bytes()):
        log.warning_once(f"worker_budget {problem}", problem)


def worker_problems(load: WorkerLoad, *, cpus: float, shared_bytes: int | None) -> Iterator[str]:
    """What is too large about `load` on a node with so many CPUs and so much shared memory."""
    if not load.num_workers:
        return
    most = int(cpus // load.readers)
    if load.busy_workers > cpus:
        yield (
            f"--num-workers {load.num_workers} on {load.readers} reading ranks of this node makes "
            f"{load.busy_workers} worker processes at a time ({load.loaders} loaders each), but "
            f"{cpus:g} CPUs may be used here; use --num-workers {most}"
        )
    if shared_bytes is not None and load.bytes_in_flight > shared_bytes:
        yield (
            f"data-loader workers keep up to {load.bytes_in_flight / 2**20:.1f} MiB of batches in "
            f"{_SHARED_MEMORY}, which has {shared_bytes / 2**20:.1f} MiB free; enlarge it (docker: "
            "--shm-size) or use --num-workers 0"
        )


def usable_cpus() -> float:
    """CPUs that this process may use: the fewer of its affinity and its cgroup's quota."""
    # macOS has no affinity; there every processor may be used.
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    quota = cgroup_cpus(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return cpus if quota is None else min(cpus, quota)


def cgroup_cpus(mount: Path, membership: Path) -> float | None:
    """CPUs that the quota of this process's cgroup allows, None without one; never raises.

    Every group from the process's own up to the mount counts (cgroups v1 and v2), since the
    tightest quota holds; in a container the process's own path is often not mounted.
    """
    quotas = [
        quota
        for top, path in _hierarchies(mount, membership)
        for folder in _up_to(top, path)
        if (quota := _quota(folder)) is not None
    ]
    return min(quotas, default=None)


def shared_memory_bytes(path: Path = _SHARED_MEMORY) -> int | None:
    """Free bytes where workers hand over batches; None where the system has no such place."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _hierarchies(mount: Path, membership: Path) -> Iterator[tuple[Path, str]]:
    """The mounted hierarchies that may hold a quota, with this process's path in each."""
    for line in (_text(membership) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # v2, alone or beside v1 ("unified")
            yield mount, path
            yield mount / "unified", path
        elif "cpu" in controllers.split(","):
            yield mount / controllers, path
            yield mount / "cpu", path


def _up_to(top: Path, path: str) -> Iterator[Path]:
    folder = top / path.strip("/")
    yield folder
    while folder != top and folder != folder.parent:
        folder = folder.parent
        yield folder


def _quota(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")
    if both is not None:
        quota, period = [*both.split(), "", ""][:2]
    else:
        quota = _text(folder / "cpu.cfs_quota_us") or ""
        period = _text(folder / "cpu.cfs_period_us") or ""
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no quota here
    return cpus if cpus > 0 else None  # v1 says -1 for none


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
