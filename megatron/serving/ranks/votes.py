"""When a rank has prepared a transition that it was asked to prepare: both come in any order.

The coordinator asks every rank over the control plane; what is done follows the log of the engine.
"""

import threading
from collections.abc import Callable

from megatron.scheduling.control.member import PrepareDone

_REMEMBERED = 16  # results that nobody has asked for


class Votes:
    """The results of one rank; from any thread.

    Args:
        report: gets a result once it is there and was asked for.
    """

    def __init__(self, report: Callable[[PrepareDone], None]) -> None:
        self._report, self._lock = report, threading.Lock()
        self._asked: int | None = None
        self._done: dict[int, PrepareDone] = {}

    def ask(self, epoch: int) -> None:
        """Note that the coordinator waits for a transition."""
        with self._lock:
            done = self._done.pop(epoch, None)
            if done is None:
                self._asked = epoch  # those before it have been rolled back
        if done is not None:
            self._report(done)

    def done(self, done: PrepareDone) -> None:
        """Note what became of a transition."""
        with self._lock:
            is_asked = self._asked == done.epoch
            if is_asked:
                self._asked = None
            else:
                self._done[done.epoch] = done
                while len(self._done) > _REMEMBERED:
                    del self._done[min(self._done)]
        if is_asked:
            self._report(done)
