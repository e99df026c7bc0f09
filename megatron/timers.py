"""Named stopwatches over the monotonic clock, which are ranges of a profiler's trace too.

Kernels on a GPU run on after the call that launched them returned: a timer measures the calls
unless `synchronize=True`, which waits for the device at both ends and slows training down.
"""

import time
from types import TracebackType

from megatron import device, spans


class Timer:
    """A stopwatch that sums the times between its starts and stops."""

    def __init__(self, name: str, *, synchronize: bool = False) -> None:
        self.name = name
        self._synchronize = synchronize
        self._started_at: float | None = None
        self._elapsed_s = 0.0
        self._count = 0
        self._span: spans.Range | None = None

    @property
    def count(self) -> int:
        """Number of starts and stops since the last reset."""
        return self._count

    def start(self) -> None:
        """Begin to measure; an error if it is already running."""
        if self._started_at is not None:
            raise RuntimeError(f"timer {self.name!r} was started twice")
        self._started_at = self._now()
        self._span = spans.span(self.name)
        self._span.__enter__()

    def stop(self) -> None:
        """Add the time since `start`; an error if it is not running."""
        if self._started_at is None:
            raise RuntimeError(f"timer {self.name!r} was stopped but is not running")
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._elapsed_s += self._now() - self._started_at
        self._started_at = None
        self._count += 1

    def elapsed(self, *, reset: bool = True) -> float:
        """Return seconds measured since the last reset; a running timer continues."""
        now = self._now() if self._started_at is not None else 0.0
        total = self._elapsed_s + (now - self._started_at if self._started_at is not None else 0.0)
        if reset:
            self._elapsed_s, self._count = 0.0, 0
            self._started_at = now if self._started_at is not None else None
        return total

    def __enter__(self) -> "Timer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _now(self) -> float:
        if self._synchronize:
            device.synchronize()
        return time.monotonic()


class Timers:
    """The timers of one process by name; a name that was never used makes a new timer."""

    def __init__(self, *, synchronize: bool = False) -> None:
        self._synchronize = synchronize
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        """Return the timer called `name`."""
        if name not in self._timers:
            self._timers[name] = Timer(name, synchronize=self._synchronize)
        return self._timers[name]

    def elapsed(self, *, reset: bool = True) -> dict[str, float]:
        """Return seconds per timer since the last reset, in the order of first use."""
        return {name: timer.elapsed(reset=reset) for name, timer in self._timers.items()}
