"""A lock file with a heartbeat: it is renewed while held, and taken over when it is not.

It records its holder (process, host, time). What a reader would get wrong: staleness is judged by
the waiting process's own clock, as the time for which the content stayed the same, so clocks of
nodes need not agree; and the lock only saves work. The lock of a paused holder may be taken over,
so the work under it must be correct when two processes do it at once.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron import atomic, log
from megatron.errors import MachineError

_CONTENT_BYTES = 512  # always as many, so that a renewal is one write of one length
_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Intervals and timeouts of holders and waiters, in seconds."""

    renew_s: float = 10.0
    lease_s: float = 60.0  # a build may hold the interpreter's lock for a while between renewals
    poll_s: float = 0.2
    log_every_s: float = 30.0  # between two log lines of a process that waits or works
    give_up_s: float = 3600.0
    settle_s: float = 2.0  # how long a holder may take to appear, for those that only wait


@contextmanager
def leased(
    path: Path, what: str, timing: LeaseTiming, *, is_done: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the lock file `path` inside of the `with` block, waiting for another holder first.

    Args:
        what: what is done under the lock, for messages ("building the index X").
        is_done: called while waiting; once it is true, the block is entered without the lock.

    Raises:
        MachineError: another holder kept the lock for longer than `timing.give_up_s`.
        OSError: the lock file cannot be made.
    """
    file = _acquire(path, what, timing, is_done)
    if file is None:
        yield
        return
    done = threading.Event()
    renewal = threading.Thread(
        target=_renew, args=(file, done, timing.renew_s), name="lease", daemon=True
    )
    renewal.start()
    try:
        yield
    finally:
        done.set()
        renewal.join()
        try:
            if os.path.samestat(os.fstat(file), os.stat(path)):  # else it was taken over
                path.unlink()
        except FileNotFoundError:
            pass  # taken over, and the new holder is done too
        finally:
            os.close(file)


@contextmanager
def report_while(
    what: str, every_s: float, report_progress: Callable[[str], None] = lambda doing: None
) -> Iterator[None]:
    """Log at intervals that `what` is still running, and call `report_progress` more often."""
    done, started = threading.Event(), time.monotonic()

    def report() -> None:
        logged_at = started
        while not done.wait(min(every_s, _BEAT_S)):
            now = time.monotonic()
            report_progress(f"{what}, for {now - started:.0f} s now")
            if now - logged_at >= every_s:
                logged_at = now
                log.info(f"still {what}, for {now - started:.0f} s now")

    reporter = threading.Thread(target=report, name="report-while", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def wait_while_leased(
    paths: Sequence[Path], what: str, timing: LeaseTiming, *, is_done: Callable[[], bool]
) -> None:
    """Return once `is_done()`, or when no process has held one of `paths` for `timing.settle_s`.

    Raises:
        MachineError: a holder kept the lock for longer than `timing.give_up_s`.
    """
    wait, watched = _BoundedWait(what, timing), [_WatchedLock(path) for path in paths]
    held_at = time.monotonic()
    while not is_done():
        contents = [lock.look() for lock in watched]
        held = [
            content
            for lock, content in zip(watched, contents)
            if content is not None and lock.unchanged_s() < timing.lease_s
        ]
        if held:
            held_at = time.monotonic()
        elif time.monotonic() - held_at >= timing.settle_s:
            return
        wait.spend(held[0] if held else None)


def _acquire(path: Path, what: str, timing: LeaseTiming, is_done: Callable[[], bool]) -> int | None:
    wait, watched = _BoundedWait(what, timing), _WatchedLock(path)
    while True:
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            pass
        else:
            try:
                _write(file, 0)
            except OSError:
                os.close(file)
                path.unlink(missing_ok=True)
                raise
            return file
        if is_done():
            return None
        content = watched.look()
        if content is not None and watched.unchanged_s() >= timing.lease_s:
            _take_over(path, content, what, watched.unchanged_s())
            continue
        wait.spend(content)


class _WatchedLock:
    """A lock file, and for how long its content has been the same by this process's clock."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen, self._since = path, b"", time.monotonic()

    def look(self) -> bytes | None:
        """Return the current content of the file; None if it does not exist."""
        content = _read(self._path)
        if content is None or content != self._seen:
            self._seen, self._since = content or b"", time.monotonic()
        return content

    def unchanged_s(self) -> float:
        """Return the seconds since the content was first seen."""
        return time.monotonic() - self._since


class _BoundedWait:
    """Waits step by step, logs it at intervals, and raises after a timeout."""

    def __init__(self, what: str, timing: LeaseTiming) -> None:
        self._what, self._timing = what, timing
        self._started = self._logged_at = time.monotonic()

    def spend(self, content: bytes | None) -> None:
        """Wait one step for the holder of the lock with this content."""
        now, timing = time.monotonic(), self._timing
        waited_s = now - self._started
        if waited_s >= timing.give_up_s:
            raise MachineError(
                f"waited too long for another process that is {self._what}",
                found=f"a lock of {_holder(content)}, after {waited_s:.0f} s",
                fix="end that process if it hangs, or give this job a --data-cache-path of its own",
            )
        if now - self._logged_at >= timing.log_every_s:
            self._logged_at = now
            log.info(
                f"waiting for {_holder(content)}, which is {self._what}, for {waited_s:.0f} s now"
            )
        time.sleep(timing.poll_s)


def _take_over(path: Path, stale: bytes, what: str, age_s: float) -> None:
    """Move a stale lock out of the way, unless another process was faster."""
    aside = atomic.temporary_name(path)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    try:
        if _read(aside) == stale:
            log.warning(
                f"the lock {path} of {_holder(stale)} was not renewed for {age_s:.0f} s; it is "
                f"taken over for {what}"
            )
            return
        # Another waiter took over between the read and the rename: put its lock back.
        try:
            os.link(aside, path)
        except OSError:
            log.warning(f"the lock {path} was lost; what is done under it may be done twice")
    finally:
        aside.unlink(missing_ok=True)


def _renew(file: int, done: threading.Event, every_s: float) -> None:
    beat = 0
    while not done.wait(every_s):
        beat += 1
        try:
            _write(file, beat)
        except OSError as error:
            log.warning_once("lease", f"a lock cannot be renewed, and may be taken over: {error}")


def _write(file: int, beat: int) -> None:
    content = {
        "process": os.getpid(),
        "host": socket.gethostname()[:200],
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "beat": beat,
    }
    os.pwrite(file, json.dumps(content).ljust(_CONTENT_BYTES).encode(), 0)
    os.fsync(file)  # or another node would not see it


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # removed, here or on another node
            return None
        raise


def _holder(content: bytes | None) -> str:
    try:
        holder = json.loads(content or b"")
        return f"process {holder['process']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"
