"""Where the threads of a process are, and whether they wait for another rank or for the device.

Only a few modules communicate or wait for a device (docs/architecture.md, "Homes"), so a stack that
leads through one of them is a rank that waits; the others are where something is stuck.
"""

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Whose callers wait for other ranks. The gate of homes lists the same modules.
COMMUNICATION = (
    "megatron/mpu/collectives.py",
    "megatron/mpu/mappings.py",
    "megatron/mpu/data.py",
    "megatron/mpu/progress_barrier.py",
    "megatron/pipeline/p2p.py",
    "megatron/pipeline/tied.py",
    "torch/distributed/distributed_c10d.py",
)
_DEVICE = ("megatron/device.py", "megatron/mpu/scalar_sums.py")  # which wait for kernels
FRAMES_SHOWN = 8  # innermost ones of a thread
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or a network file system",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}


class ProcessName(NamedTuple):
    """One process of the cluster: its pid may be given to another one, with another start."""

    host: str
    pid: int
    started: int  # in clock ticks since the machine's start; 0 where that cannot be read

    @classmethod
    def own(cls) -> "ProcessName":
        """Return the name of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessName":
        """Return the name of a process of this machine."""
        return cls(_host(), pid, _stat(pid)[1])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine that still exists."""
        return self.host == _host() and self.started > 0 and _stat(self.pid)[1] == self.started

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this machine, and is over."""
        return self.host == _host() and self.started > 0 and not self.is_here

    @property
    def is_stopped(self) -> bool:
        """Whether it is a process of this machine that runs nothing until SIGCONT."""
        return self.is_here and _stat(self.pid)[0] == "T"

    def state(self) -> str | None:
        """Return what the kernel says of it: runs, sleeps, is stopped; None from elsewhere."""
        if self.host != _host():
            return None
        state, started = _stat(self.pid)
        return _STATES.get(state, state) if started == self.started else "has ended"


def thread_stacks() -> str:
    """Return the stacks of all threads of this process, innermost frame last, main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident or 0
    frames = sys._current_frames()
    own = threading.get_ident()
    order = sorted((ident for ident in frames if ident != own), key=lambda one: one != main)
    parts = [
        f"thread {names.get(ident, ident)}:\n{_text(frames[ident])}"
        for ident in order
        if ident == main or _is_ours(frames[ident])
    ]
    return "\n".join(parts)


def main_thread_stack() -> str:
    """Return the stack of the main thread, innermost line last.

    What other ranks waited for is on the rank that was not waiting itself.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "  (the main thread is over)" if frame is None else _text(frame)


def main_thread_waits_for() -> str | None:
    """Return what the main thread or one of autograd's waits for; None: it does its own work."""
    main = threading.main_thread().ident
    others = {thread.ident for thread in threading.enumerate()} - {main}
    for ident, frame in sys._current_frames().items():
        if ident in others:  # those of autograd are unknown to Python
            continue
        for each in _outwards(frame):
            name = each.f_code.co_filename
            if name.endswith(COMMUNICATION):
                return f"other ranks, in {each.f_code.co_name} ({_short(name)}:{each.f_lineno})"
            if name.endswith(_DEVICE):
                return f"the device, in {each.f_code.co_name} ({_short(name)}:{each.f_lineno})"
    return None


def main_thread_place() -> str:
    """Return the innermost line of this project's code that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere: the main thread is over"
    ours = next((each for each in _outwards(frame) if _is_project(each)), frame)
    inner = "" if ours is frame else f", which called {frame.f_code.co_name}"
    return f"{_short(ours.f_code.co_filename)}:{ours.f_lineno} in {ours.f_code.co_name}{inner}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_project(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "site-packages" not in name and not name.startswith((sys.prefix, "<", sys.base_prefix))


def _is_ours(frame: FrameType) -> bool:
    """Return whether a thread runs code of the project, but for the threads of this package."""
    project = [each.f_code.co_filename for each in _outwards(frame) if _is_project(each)]
    return bool(project) and "/megatron/peers/" not in project[0]


def _text(frame: FrameType) -> str:
    frames = list(_outwards(frame))[:FRAMES_SHOWN]
    lines = []
    for each in reversed(frames):
        code = each.f_code
        lines.append(f'  File "{code.co_filename}", line {each.f_lineno}, in {code.co_name}')
        source = linecache.getline(code.co_filename, each.f_lineno).strip()
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def raised_in_communication(error: BaseException) -> bool:
    """Return whether an error came out of a call that communicates with other ranks."""
    return isinstance(error, RuntimeError) and any(
        frame.f_code.co_filename.endswith(COMMUNICATION)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


@lru_cache(maxsize=1)
def _host() -> str:
    """Return the machine's name, with what tells it and its process ids from all others."""
    parts = [os.uname().nodename]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            where = Path(path)
            parts.append(os.readlink(path) if where.is_symlink() else where.read_text().strip())
        except OSError:
            parts.append("?")
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of a process and when it began; ("X", 0) where there is none."""
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "X", 0
