"""Ends this process within seconds when another rank has failed.

A rank whose peer died sits in a collective until its timeout, minutes later, and then reports the
timeout instead of the reason. So the first rank to fail writes why into the rendezvous store, and
a thread in every process looks there. It also finds ranks that have stopped (`stall.py`); a second
thread ends the process when the store itself no longer answers.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store  # torch.distributed's own, which has no type there

from megatron import log
from megatron.errors import MachineError, MegatronError, PeerError, first_line
from megatron.launch import report_to_torchrun
from megatron.peers import native_stacks
from megatron.peers.activity import Activity
from megatron.peers.records import Failure
from megatron.peers.stacks import ProcessName, main_thread_stack
from megatron.peers.stall import StallLimits, StallWatch

_FAILURE = "megatron/first_failure"
_CLOSED = "megatron/closed"
_POLL_S = 0.5  # of up to a thousand ranks; more of them look less often
_RANKS_PER_POLL = 1000
_GRACE_S = 2.0  # for the main thread to end by itself, with a traceback of its own
_LINGER_S = 5.0  # how long a rank waits for the others, if its end would look like their failure
_PRECEDENCE_S = 0.5  # the rank that failed ends first, since launchers call the first the cause
_LINGER_POLL_S = 0.05
_PAUSE_S = 2.0  # between two looks of the second thread: this process itself was stopped


class PeerWatch:
    """Announces a failure here to the other ranks, and ends this process after one elsewhere.

    The watching thread ends the process by `os._exit` with PeerError's exit code: the main thread
    may be inside a collective that no exception reaches. Make one per process, after the
    rendezvous, and `close` it before the process group is destroyed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        activity: Activity | None = None,
        limits: StallLimits | None = None,
    ) -> None:
        """Begin to watch.

        Args:
            activity: what the main thread does; with `limits`, ranks that have stopped are found.
        """
        # A connection of its own: a main thread that waits in the store would block this one. The
        # store itself is kept alive, because the one of rank 0 may be the server.
        self._given = store
        self._store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._world_size = rank, world_size
        self._closing, self._is_ending = threading.Event(), threading.Event()
        self._announced = False
        self._on_failure: Callable[[MegatronError], None] | None = None
        self._stalls: StallWatch | None = None
        self._limits = limits
        self._answered_at = time.monotonic()  # by the store
        self._host: ProcessName | None = None  # of the store, as far as that is known
        if activity is not None and limits is not None:
            self._stalls = StallWatch(self._store, rank, world_size, activity, limits)
            threading.Thread(target=self._watch_store, name="store-watch", daemon=True).start()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()
        # A daemon thread that is inside the store while the interpreter shuts down aborts it.
        atexit.register(self.close)

    @property
    def store(self) -> Store:
        """The store that was given, for the caller that makes the process group."""
        return self._given

    def tell(self, on_failure: Callable[[MegatronError], None]) -> None:
        """Have the failure or the stop of another rank told at once, before this process ends.

        Whoever is told has two seconds to end the process, or to say what it has to.

        Args:
            on_failure: called in the watching thread; it does not wait for anything.
        """
        self._on_failure = on_failure

    def announce(self, error_text: str) -> None:
        """Announce to the other ranks that this one fails; only the first announcement counts."""
        self._announced = True
        self._write(Failure(self._rank, error_text, self._rank))

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
            if self._stalls is not None:
                self._stalls.close()
            closed = self._store.add(_CLOSED, 1)
            deadline = time.monotonic() + _LINGER_S
            waits = self._rank == 0 or self._announced
            while waits and closed < self._world_size and time.monotonic() < deadline:
                time.sleep(_LINGER_POLL_S)
                closed = self._store.add(_CLOSED, 0)
            if self._rank == 0 and self._announced:
                time.sleep(3 * _LINGER_POLL_S)  # for others that still poll who has closed

    def _watch(self) -> None:
        pause = _POLL_S * max(1.0, self._world_size / _RANKS_PER_POLL)
        while not self._closing.wait(pause):
            error = self._look()
            if error is not None:
                self._is_ending.set()
                self._tell(error)
                if not self._closing.wait(_GRACE_S):
                    _end_process(error, self._store)
            if self._stalls is not None:
                self._look_for_stalls(self._stalls)
            self._answered_at = time.monotonic()

    def _tell(self, error: MegatronError) -> None:
        if self._on_failure is not None:
            self._on_failure(error)

    def _look(self) -> PeerError | None:
        """Return the reason to end this process: another rank's failure, or a lost store."""
        try:
            if not self._store.check([_FAILURE]):
                return None
            failure = Failure.parse(self._store.get(_FAILURE))
        except RuntimeError as error:
            return PeerError(
                "the rank that hosts the rendezvous store is gone",
                found=first_line(error),
                fix="read the end of rank 0's log; start the job again if its machine failed",
            )
        if failure.by == self._rank:
            return None
        if failure.process is not None:
            _end_stalled(failure.process)
        return PeerError(
            f"{failure.name} failed, so this rank ends too",
            found=f"{failure.name}: {failure.message}",
            fix=f"act on the message of {failure.name}",
        )

    def _look_for_stalls(self, stalls: StallWatch) -> None:
        """End this process, and by a message the others, if a rank has stopped for too long."""
        try:
            stall = stalls.poll()
            if self._host is None and (beat := stalls.beat_of(0)) is not None:
                self._host = beat.process
        except RuntimeError:  # the store is gone, which the next look says
            return
        if stall is None or self._closing.is_set():
            return
        self._is_ending.set()
        process = None if stall.rank == self._rank else stall.process
        self._write(Failure(stall.rank, stall.message, self._rank, process))
        error, found_at = _stalled(f"rank {stall.rank}", stall.message), time.monotonic()
        self._tell(error)
        # Others read the reason before a launcher ends them; the one that has stopped never will.
        deadline = found_at + 2 * _POLL_S + _GRACE_S + _PRECEDENCE_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                if self._store.add(_CLOSED, 0) >= self._world_size - 2:
                    break
                time.sleep(_LINGER_POLL_S)
        # A main thread that nobody tells is within a collective, and knows less of the cause.
        grace = found_at + _GRACE_S - time.monotonic() if self._on_failure is not None else 0.0
        ends_by_itself = grace > 0 and self._closing.wait(grace)
        if process is not None:
            _end_stalled(process)
        if not ends_by_itself:
            _end_process(error, self._store)

    def _watch_store(self) -> None:
        """End this process if the store does not answer: its host has stopped, or is cut off.

        A call to a store has no deadline of its own that holds whatever its host does.
        """
        limits, looked_at, is_named = self._limits, time.monotonic(), False
        if limits is None:
            return
        while not self._closing.wait(_POLL_S):
            native_stacks.note_python_runs()
            now = time.monotonic()
            if now - looked_at > _PAUSE_S or self._is_ending.is_set():
                self._answered_at = now
            looked_at = now
            silence = now - self._answered_at
            if silence < limits.named_s:
                is_named = False
                continue
            host = "rank 0, or the launcher that hosts the rendezvous store"
            text = f"no answer of the store for {silence:.0f} s"
            if self._host is not None and (state := self._host.state()) is not None:
                text += f"; rank 0 ({self._host}) {state}"
            if not is_named:
                is_named = True
                log.error(f"the run has stalled: {host}: {text}")
            if limits.silent_s is not None and silence >= limits.silent_s:
                if self._host is not None and self._rank:
                    _end_stalled(self._host)
                _end_process(_stalled(host, text), None)

    def _write(self, failure: Failure) -> None:
        """Write why the job ends; only the first failure counts."""
        try:
            self._store.compare_set(_FAILURE, "", failure.encode())
        except RuntimeError as error:  # the store is gone, so no rank can read this
            log.error(f"could not notify the other ranks of this failure: {error}")


def _stalled(who: str, message: str) -> MachineError:
    return MachineError(
        f"{who} has stopped, so the run ends",
        found=message,
        fix="start the job again; if it is the same node again, leave that node out. If ranks may "
        "pause for so long, use a longer --stall-exit-timeout",
    )


def _end_stalled(process: ProcessName) -> None:
    """End a rank of this job that does not answer, if it is on this machine.

    A launcher asks it to end first, and waits half a minute for the answer of a stopped process.
    """
    if process.is_here and process.pid != os.getpid():
        with contextlib.suppress(OSError):  # it ended by itself, or belongs to somebody else
            os.kill(process.pid, signal.SIGKILL)


def _end_process(error: MegatronError, store: Store | None) -> None:
    """Print why this process ends, and where it was, and end it. `store`: None if it is silent."""
    log.error(f"{error}\nthis rank was here:\n{main_thread_stack()}")
    with contextlib.suppress(RuntimeError):  # the store is gone, so no other rank can be notified
        if store is not None:
            store.add(_CLOSED, 1)
    with contextlib.suppress(OSError):  # which has been said already, on this rank's terminal
        report_to_torchrun(log.masked(str(error)), error.exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(error, PeerError):
        time.sleep(_PRECEDENCE_S)
    os._exit(error.exit_code)
