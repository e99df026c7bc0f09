"""What the main thread of a process does, and since when; another thread reads it.

The training loop says when a step begins and when it leaves the steps for something else. From that
follow how long a step takes, how long is too long, and where the time of a run went.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

START, STEP, EVALUATION, SAVE = "start", "step", "evaluation", "save"
DATA, HOOKS, END = "wait for data", "between steps", "after the steps"
_SHORT = (DATA, HOOKS)  # in every step, so that memory is not looked at
_STEPS_REMEMBERED = 32
_FEWEST_STEPS = 3  # before which nobody knows how long a step takes
_STEPS_WITHOUT_PROGRESS = 5


class StepTimes(NamedTuple):
    """Seconds that a process spent in its steps so far, by what it did.

    Attributes:
        computing: in its own work, which is all that is not one of the others.
        data: waiting for batches that it reads itself.
        peers: waiting for other ranks; the time in which data travel is part of it.
    """

    computing: float
    data: float
    peers: float

    def since(self, before: "StepTimes") -> "StepTimes":
        """Return the seconds between `before` and this."""
        return StepTimes(*(now - then for now, then in zip(self, before)))


class Doing(NamedTuple):
    """What a main thread does at one moment."""

    section: str
    iteration: int
    seconds: float  # since its last sign of progress

    def __str__(self) -> str:
        return f"{self.section} {self.iteration}" if self.section == STEP else self.section


class Activity:
    """The sections that the main thread goes through, and the seconds spent in each.

    Written by the main thread, at the price of two reads of a clock; read by others.

    Args:
        peak_bytes: returns the most memory ever in use; None: memory is not looked at.
    """

    def __init__(self, peak_bytes: Callable[[], int] | None = None) -> None:
        self._peak_bytes = peak_bytes
        self._marks: dict[str, int] = {}  # memory in use at most, where it was more than before
        self._lock = threading.Lock()
        self._section, self._iteration = START, 0
        self._since = self._progress_at = self._step_at = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._outside = 0.0  # of the present step, in other sections
        self._step_data = self._step_peers = 0.0  # seconds of waits in all steps
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)

    def step(self, iteration: int) -> None:
        """Note that the main thread begins iteration `iteration`."""
        if not self._iteration:
            self._mark(START)
        with self._lock:
            now = self._enter(STEP)
            if self._iteration:
                self._steps.append(now - self._step_at - self._outside)
            self._iteration, self._step_at, self._outside = iteration, now, 0.0

    def end(self) -> None:
        """Note that no more steps follow: what comes has no usual length."""
        with self._lock:
            self._enter(END)

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """Count the time of the block for `section`; the section around it goes on after it."""
        if section not in _SHORT:
            self._mark(self._section)
        with self._lock:
            around, began = self._section, self._enter(section)
        try:
            yield
        finally:
            if section not in _SHORT:
                self._mark(section)
            with self._lock:
                now = self._enter(around)
                if around == STEP and section == DATA:
                    self._step_data += now - began  # such a step takes longer
                elif around == STEP:
                    self._outside += now - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as a wait for other ranks, where it is within a step.

        The section stays, and nothing of it is a sign of progress.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            if self._section == STEP:
                self._step_peers += time.monotonic() - began

    def step_times(self) -> StepTimes:
        """Return the seconds spent in steps so far."""
        in_steps, peers = self.seconds().get(STEP, 0.0), self._step_peers
        return StepTimes(in_steps - peers, self._step_data, peers)

    def memory_marks(self) -> dict[str, int]:
        """Return the most bytes in use by section, of those in which it was more than before."""
        self._mark(self._section)
        return dict(self._marks)

    def now(self) -> Doing:
        """Return what the main thread does at this moment."""
        with self._lock:
            return Doing(self._section, self._iteration, time.monotonic() - self._progress_at)

    def step_limit(self, least_s: float) -> float | None:
        """Return seconds without progress within a step that are too many; None before it is known.

        They are those of five steps (their median), and `least_s` at least.
        """
        with self._lock:
            if len(self._steps) < _FEWEST_STEPS:
                return None
            return max(least_s, _STEPS_WITHOUT_PROGRESS * statistics.median(self._steps))

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of each section so far; they add up to the age of this object."""
        with self._lock:
            self._enter(self._section, is_progress=False)
            return dict(self._seconds)

    def _mark(self, section: str) -> None:
        """Read the high-water mark, which takes too long on a GPU to be done in every step."""
        if self._peak_bytes is None:
            return
        peak = self._peak_bytes()
        if peak > max(self._marks.values(), default=0):
            self._marks[section] = peak

    def _enter(self, section: str, *, is_progress: bool = True) -> float:
        now = time.monotonic()
        self._seconds[self._section] = self._seconds.get(self._section, 0.0) + now - self._since
        self._section, self._since = section, now
        if is_progress:
            self._progress_at = now
        return now
