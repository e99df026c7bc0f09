"""What this process may use of its host: CPUs, memory of its own, and memory that is shared.

What a reader would get wrong: a container that may use 4 CPUs and 8 GiB still shows all of the
host's, and only its cgroup has the limits. Nothing here raises: an unknown limit is none.
"""

import ctypes
import gc
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's workers put finished batches
_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY, _PROCESSORS = Path("/proc/meminfo"), Path("/proc/cpuinfo")
_CLEAR_HIGH_WATER_MARK = "5"  # of clear_refs in proc(5)
_FROZEN_BY_PYTHON = 1000  # at most: Python 3.12 starts with 375 such objects, others with none
_FULL_COLLECTION = 2  # the generation of Python's garbage that is collected then
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def usable_cpus() -> float:
    """Return the number of usable CPUs: the minimum of affinity and cgroup quota."""
    # macOS has no affinity; there every processor may be used.
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = float(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    quota = cgroup_cpus(_MOUNT, _MEMBERSHIP)
    return cpus if quota is None else min(cpus, quota)


def processor_vendor(described_in: Path = _PROCESSORS) -> str:
    """Return who made this CPU: GenuineIntel, AuthenticAMD, ..; "" where Linux does not tell."""
    found = re.search(r"^vendor_id\s*: (\S+)$", _text(described_in) or "", flags=re.MULTILINE)
    return found[1] if found else ""


def available_memory_bytes() -> int | None:
    """Return bytes that processes may still use without swapping; None if unknown.

    The minimum of the kernel's available memory and the cgroup's rest. Pages of files count as
    free, since they are dropped when memory is short.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MEMORY) or "", flags=re.MULTILINE)
    both = (int(found[1]) * 1024 if found else None, cgroup_memory_bytes(_MOUNT, _MEMBERSHIP))
    return min((size for size in both if size is not None), default=None)


def cgroup_cpus(mount: Path, membership: Path) -> float | None:
    """Return the CPUs that this process's cgroups allow, None without a quota. Never raises."""
    return min(_limits(mount, membership, "cpu", _quota), default=None)


def cgroup_memory_bytes(mount: Path, membership: Path) -> int | None:
    """Return the bytes left by this process's cgroups, None without a limit. Never raises."""
    return min(_limits(mount, membership, "memory", _room), default=None)


def kills_for_memory(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return how many processes of this one's cgroup the kernel has killed because memory ran out.

    Those of groups within it count too. 0 where no counter can be read. Never raises.
    """
    return next(_limits(mount, membership, "memory", _kills), 0)


def cgroup_folders(
    controller: str, mount: Path = _MOUNT, membership: Path = _MEMBERSHIP
) -> Iterator[Path]:
    """Yield where the groups of this process may be, its own before those around it (v1, v2).

    In a container the process's own path is often not mounted.
    """
    for top, path in _hierarchies(mount, membership, controller):
        yield from _up_to(top, path)


def shared_memory_bytes(path: Path = SHARED_MEMORY) -> int | None:
    """Return the free bytes of /dev/shm for data workers; None where it does not exist."""
    try:
        return free_bytes(path)
    except OSError:
        return None


def free_bytes(folder: Path) -> int:
    """Return how many bytes this user may still write to the file system of a folder.

    Raises:
        OSError: there is no such folder.
    """
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def resident_bytes(field: str, status: str | None = None) -> int:
    """Return the bytes of a field of /proc/self/status: VmRSS is now, VmHWM the most until now.

    Raises:
        OSError: the system has no such file, or the file no such field.
    """
    text = Path("/proc/self/status").read_text() if status is None else status
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, flags=re.MULTILINE)
    if found is None:
        raise OSError(f"no {field} in kB in the status of this process")
    return int(found[1]) * 1024


def peak_resident_bytes(*, with_children: bool = False) -> int:
    """Return the most bytes that this process had in memory: the kernel's high-water mark.

    No sampling is involved, so that the shortest spike counts. `getrusage` is used where the kernel
    has no such mark; a process that was just started has that of its parent there.

    Args:
        with_children: add the marks of all processes that this one has started and that still run,
            such as data workers; pages that several of them share count in each.
    """
    try:
        own = resident_bytes("VmHWM")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage: KiB on Linux, bytes on macOS
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if not with_children:
        return own
    statuses = (_text(Path(f"/proc/{child}/status")) for child in _descendants(os.getpid()))
    # A process that has just ended has no memory, and no field.
    return own + sum(resident_bytes("VmHWM", text) for text in statuses if text and "VmHWM" in text)


def reset_peak_resident() -> bool:
    """Begin the high-water marks of this process and its children anew; False if that cannot be."""
    try:
        for process in (os.getpid(), *_descendants(os.getpid())):
            Path(f"/proc/{process}/clear_refs").write_text(_CLEAR_HIGH_WATER_MARK)
    except OSError:
        return False
    return True


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next tensors; return whether it can.

    glibc gives large blocks back to the kernel as soon as they are freed, so that every step of a
    training takes its activations page by page, each zeroed first. Other libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Inside the block, let Python look only once for garbage among the objects that are there.

    A training of a small GPT has 220,000 objects, which a full collection takes 0.1 s to look at:
    at another step on every rank, while all others wait. The first one is still such a one; a
    short run has none. Where somebody else has left objects out (`gc.freeze`), as a server that
    forks does, nothing is changed: the end of the block would bring theirs back as well.
    """
    is_frozen = False

    def keep(phase: str, info: dict[str, int]) -> None:
        nonlocal is_frozen
        if phase == "stop" and info["generation"] == _FULL_COLLECTION:
            gc.callbacks.remove(keep)
            if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:
                gc.freeze()
                is_frozen = True

    gc.callbacks.append(keep)
    try:
        yield
    finally:
        if keep in gc.callbacks:
            gc.callbacks.remove(keep)
        if is_frozen:
            gc.unfreeze()


def in_gib(size: int) -> str:
    """Return bytes as text in GiB, for messages."""
    return f"{size / 2**30:.2f} GiB"


def _descendants(process: int) -> Iterator[int]:
    for children in sorted(Path(f"/proc/{process}/task").glob("*/children")):
        for child in map(int, (_text(children) or "").split()):
            yield child
            yield from _descendants(child)


def _limits(
    mount: Path, membership: Path, wanted: str, read: Callable[[Path], T | None]
) -> Iterator[T]:
    """Yield what `read` finds from the process's group up; the tightest limit holds."""
    for folder in cgroup_folders(wanted, mount, membership):
        found = read(folder)
        if found is not None:
            yield found


def _hierarchies(mount: Path, membership: Path, wanted: str) -> Iterator[tuple[Path, str]]:
    """Yield the mounted hierarchies that may limit `wanted`, with this process's path in each."""
    for line in (_text(membership) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # v2, alone or beside v1 ("unified")
            yield mount, path
            yield mount / "unified", path
        elif wanted in controllers.split(","):
            yield mount / controllers, path
            yield mount / wanted, path


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
    return cpus if cpus > 0 else None  # -1 in v1 is none


def _room(folder: Path) -> int | None:
    """Return bytes left of a group's limit, page cache counted as free; None without a limit."""
    new = (folder / "memory.max").exists()
    limit = _text(folder / ("memory.max" if new else "memory.limit_in_bytes"))
    usage = _text(folder / ("memory.current" if new else "memory.usage_in_bytes"))
    files = r"^(?:in)?active_file (\d+)$" if new else r"^total_(?:in)?active_file (\d+)$"
    stat = _text(folder / "memory.stat") or ""
    try:
        most, used = int(limit or ""), int(usage or "")
    except ValueError:
        return None  # "max", or no limit here
    pages = sum(map(int, re.findall(files, stat, flags=re.MULTILINE)))
    return max(0, most - max(0, used - pages))


def _kills(folder: Path) -> int | None:
    """Return the counter of a group; in v1 each group has one of its own, which are added."""
    own = folder / "memory.oom_control"
    old = (Path(group, own.name) for group, _, _ in os.walk(folder)) if own.exists() else ()
    texts = map(_text, (folder / "memory.events", *old))
    found = re.findall(r"^oom_kill (\d+)$", "\n".join(filter(None, texts)), flags=re.MULTILINE)
    return sum(map(int, found)) if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
