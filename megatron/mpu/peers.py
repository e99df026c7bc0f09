"""Ends this process within seconds when another rank has failed.

A rank whose peer died sits in a collective until its timeout, minutes later, and then reports the
timeout instead of the reason. So the first rank to fail writes why into the rendezvous store, and
a thread in every process looks there once a second.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from typing import NamedTuple

from torch._C._distributed_c10d import Store  # torch.distributed's own, which has no type there

from megatron import log
from megatron.errors import PeerError

_FAILURE = "megatron/first_failure"
_CLOSED = "megatron/closed"
_POLL_S = 1.0
_GRACE_S = 2.0  # for the main thread to end by itself, with a traceback of its own
_LINGER_S = 5.0  # how long a rank waits for the others, if its end would look like their failure
_PRECEDENCE_S = 0.5  # the rank that failed ends first, since launchers call the first the cause
_LINGER_POLL_S = 0.05
_LONGEST_MESSAGE = 4000
_FRAMES_SHOWN = 8  # innermost ones of the place where a rank was ended


class Failure(NamedTuple):
    """The first rank that failed, and its error message."""

    rank: int
    message: str


class PeerWatch:
    """Announces a failure here to the other ranks, and ends this process after one elsewhere.

    The watching thread ends the process by `os._exit` with PeerError's exit code: the main thread
    may be inside a collective that no exception reaches. Make one per process, after the
    rendezvous, and `close` it before the process group is destroyed.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        # A connection of its own: a main thread that waits in the store would block this one. The
        # store itself is kept alive, because the one of rank 0 may be the server.
        self._given = store
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._world_size = rank, world_size
        self._closing = threading.Event()
        self._announced = False
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()
        # A daemon thread that is inside the store while the interpreter shuts down aborts it.
        atexit.register(self.close)

    @property
    def store(self) -> Store:
        """The store that was given, for the caller that makes the process group."""
        return self._given

    def announce(self, error_text: str) -> None:
        """Announce to the other ranks that this one fails; only the first announcement counts."""
        self._announced = True
        record = json.dumps({"rank": self._rank, "message": error_text[:_LONGEST_MESSAGE]})
        try:
            self._store.compare_set(_FAILURE, "", record)
        except RuntimeError as error:  # the store is gone, so no rank can read this
            log.error(f"could not notify the other ranks of this failure: {error}")

    def check(self) -> None:
        """Raise PeerError if another rank has failed: for waits without a collective.

        So a main thread can clean up, where the watching thread could only end the process.
        """
        error = self._look()
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop watching. Rank 0, and one that announced its failure, wait a few seconds for others.

        Rank 0 may host the store, and ranks still at work would take its normal end for a failure.
        A launcher kills all ranks as soon as one ends badly, so that one waits until the others
        have the reason.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the host may go first now
            closed = self._store.add(_CLOSED, 1)
            deadline = time.monotonic() + _LINGER_S
            waits = self._rank == 0 or self._announced
            while waits and closed < self._world_size and time.monotonic() < deadline:
                time.sleep(_LINGER_POLL_S)
                closed = self._store.add(_CLOSED, 0)
            if self._rank == 0 and self._announced:
                time.sleep(3 * _LINGER_POLL_S)  # for others that still poll who has closed

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            error = self._look()
            if error is not None and not self._closing.wait(_GRACE_S):
                _end_process(error, self._store)

    def _look(self) -> PeerError | None:
        """Return the reason to end this process: another rank's failure, or a lost store."""
        try:
            if not self._store.check([_FAILURE]):
                return None
            failure = Failure(**json.loads(self._store.get(_FAILURE)))
        except RuntimeError as error:
            return PeerError(
                "the rank that hosts the rendezvous store is gone",
                found=str(error).splitlines()[0],
                fix="read the end of rank 0's log; start the job again if its machine failed",
            )
        if failure.rank == self._rank:
            return None
        return PeerError(
            f"rank {failure.rank} failed, so this rank ends too",
            found=f"rank {failure.rank}: {failure.message}",
            fix=f"act on the message of rank {failure.rank}",
        )


def main_thread_stack() -> str:
    """Return the stack of the main thread, innermost line last.

    What other ranks waited for is on the rank that was not waiting itself.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "  (the main thread is over)"
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES_SHOWN:])).rstrip()


def _end_process(error: PeerError, store: Store) -> None:
    log.error(f"{error}\nthis rank was here:\n{main_thread_stack()}")
    with contextlib.suppress(RuntimeError):  # the store is gone, so no other rank can be notified
        store.add(_CLOSED, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_PRECEDENCE_S)
    os._exit(PeerError.exit_code)
