"""One rank of `guard_cost.py`: pretrain_gpt.py, with CPU seconds of the guards written to a file.

The guards are two threads, the server of the store, notes of what the main thread does, and
comparisons between ranks. What a reader would get wrong: a measured call holds the time of reading
the clock, which is more than most guards take, and is subtracted.
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from megatron.loop.hooks import AgreeOnState
from megatron.mpu import collectives
from megatron.peers.activity import Activity
from megatron.training import CheckData
from pretrain_gpt import program

T = TypeVar("T")
NOTES, COMPARISONS = "notes of the main thread", "comparisons of ranks"
# Names of threads; the last one is torch's, and serves the store of all ranks in rank 0.
THREADS = ("peer-watch", "store-watch", "pt_tcpstore_uv")
PROCESS = "process"
WARM_UP = 5  # steps
_CALIBRATIONS = 20_000


class Tally:
    """CPU seconds of one thread within measured calls, by name; calls within calls count once."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """Find out what a measured call takes that does nothing."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock, self._own_s, self._is_inside = clock, 0.0, False
        for _ in range(_CALIBRATIONS):
            self.measure("nothing", int)
        self._own_s = self.seconds.pop("nothing") / _CALIBRATIONS

    def measure(self, name: str, call: Callable[[], T]) -> T:
        """Call, and add the seconds that it took."""
        if self._is_inside:
            return call()
        self._is_inside = True
        began = self._clock()
        try:
            return call()
        finally:
            self.seconds[name] += self._clock() - began - self._own_s
            self._is_inside = False

    def measured(self, name: str, real: Callable[..., T]) -> Callable[..., T]:
        """Return a function whose calls are measured."""
        return lambda *args: self.measure(name, partial(real, *args))

    def measured_block(
        self, name: str, real: Callable[..., AbstractContextManager[T]]
    ) -> Callable[..., AbstractContextManager[T]]:
        """Return a context manager whose beginning and end are measured, and not its block."""

        @contextmanager
        def block(*args: Any) -> Iterator[T]:
            inner = self.measure(name, partial(real, *args))
            with ExitStack() as stack:
                stack.push(lambda *error: self.measure(name, partial(inner.__exit__, *error)))
                yield self.measure(name, inner.__enter__)

        return block


def seconds_of_threads() -> Mapping[str, float]:
    """Return CPU seconds of the threads of the guards so far, and of the whole process.

    Raises:
        OSError: the kernel does not count them.
    """
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {PROCESS: time.process_time(), **dict.fromkeys(THREADS, 0.0)}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        name = names.get(int(task.name), name)
        if name in THREADS:
            found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


@contextmanager
def measured_guards(write: Callable[[Mapping[str, float]], object]) -> Iterator[None]:
    """Measure the guards within the block, from a step after the warm-up to the last one.

    Args:
        write: is called after the last step, with seconds by name.
    """
    tally = Tally()
    begin, end = Activity.step, Activity.end
    before: Mapping[str, float] = {}

    def step(activity: Activity, iteration: int) -> None:
        nonlocal before
        if iteration == WARM_UP + 1:
            tally.seconds.clear()
            before = seconds_of_threads()
        tally.measure(NOTES, partial(begin, activity, iteration))

    def last(activity: Activity) -> None:
        after = seconds_of_threads()
        write({name: after[name] - before[name] for name in after} | tally.seconds)
        end(activity)

    with ExitStack() as patches:
        for owner, name, new in (
            (Activity, "step", step),
            (Activity, "end", last),
            (Activity, "during", tally.measured_block(NOTES, Activity.during)),
            (Activity, "waiting", tally.measured_block(NOTES, Activity.waiting)),
            (collectives, "_both", tally.measured_block(NOTES, collectives._both)),
            (AgreeOnState, "__call__", tally.measured(COMPARISONS, AgreeOnState.__call__)),
            (CheckData, "__call__", tally.measured(COMPARISONS, CheckData.__call__)),
        ):
            patches.enter_context(patch.object(owner, name, new))
        yield


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    with measured_guards(lambda seconds: path.write_text(json.dumps(seconds), encoding="utf-8")):
        program()
