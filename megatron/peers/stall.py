"""Finds ranks that have stopped: each writes signs of life, and reads those of its neighbour.

Two things are told apart. A rank without any sign of life is stopped, cut off, or holds the
interpreter's lock: the rank before it finds that. A rank that is alive and makes no progress within
a step, and does not wait for others, names itself. What a reader would get wrong: a process that
was stopped itself (a suspended laptop) must not take its own pause for that of its neighbour.
"""

import time
from typing import NamedTuple

from torch._C._distributed_c10d import Store  # torch.distributed's own, which has no type there

from megatron import log
from megatron.peers import native_stacks
from megatron.peers.activity import DATA, END, START, STEP, Activity, Doing
from megatron.peers.records import Beat, Failure
from megatron.peers.stacks import (
    ProcessName,
    main_thread_place,
    main_thread_waits_for,
    thread_stacks,
)

CLOSED = "closed"  # of a rank that has left
_STALL = "megatron/stall"
_ASKED = "megatron/stall_stacks"  # ranks that came to ask the silent one for its stacks
_LAST = 1.5  # times as long a rank waits for others until it ends the run: none named itself
_NAMED_BEFORE_END = 0.8  # of the time outside of steps: collectives that time out then end the run
_OWN_PAUSE_S = 2.0  # between two polls: this process was stopped, or the machine was asleep


class StallLimits(NamedTuple):
    """Seconds after which a rank that has stopped is named, and the run ends.

    Attributes:
        named_s: at least so long without a sign, or without progress; five steps where they take
            longer.
        silent_s: so long without a sign of life ends the run; twice the time until a rank is named,
            where that is longer. None: never.
        still_s: so long without progress in a step ends the run. None: never.
        start_s: as `silent_s`, before the first step: libraries that index data hold the
            interpreter's lock for minutes.
    """

    named_s: float
    silent_s: float | None
    still_s: float | None
    start_s: float


class Stall(NamedTuple):
    """A rank that has stopped: what is known of it."""

    rank: int
    message: str
    process: ProcessName
    seconds: float
    is_final: bool  # whether the run has to end


class Neighbour:
    """The signs of life of one other rank, judged by this process's clock."""

    def __init__(self, rank: int, limits: StallLimits) -> None:
        self.rank, self._limits = rank, limits
        self._beat: Beat | None = None
        self._changed_at = 0.0

    def hear(self, beat: Beat | None, now: float) -> None:
        """Take the beat that was read last."""
        if beat is not None and (self._beat is None or beat != self._beat):
            self._beat, self._changed_at = beat, now

    def forgive(self, now: float) -> None:
        """Begin to wait anew: this process was not there to listen."""
        self._changed_at = now

    def stall(self, now: float) -> Stall | None:
        """Return the stall of that rank, if it is silent for too long."""
        beat = self._beat
        if beat is None or beat.section == CLOSED:
            return None
        silence = now - self._changed_at
        if beat.process.has_ended:
            text = f"its process has ended without a message ({beat.process})"
            return Stall(self.rank, text, beat.process, silence, is_final=True)
        named, final = _silent_limits(beat, self._limits)
        if silence < named:
            return None
        doing = Doing(beat.section, beat.iteration, 0.0)
        state = beat.process.state()
        what = f"; it {state}" if state else ""
        text = f"no sign of life for {silence:.0f} s, in {doing} ({beat.process}{what})"
        is_final = final is not None and silence >= final
        return Stall(self.rank, text, beat.process, silence, is_final)


class StallWatch:
    """Writes this rank's signs of life, and finds stalls of this rank and of the next one.

    `poll` is called by the thread that watches the store.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, activity: Activity, limits: StallLimits
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._activity, self._limits = activity, limits
        self._next = Neighbour((rank + 1) % world_size, limits)
        self._process = ProcessName.own()
        native_stacks.install()
        self._number = 0
        self._polled_at: float | None = None
        self._announced: str | None = None  # the stall that this rank wrote into the store
        self._shown: Failure | None = None  # the one whose stacks this rank has printed
        self._write(START, 0)  # the main thread may take the interpreter's lock before a poll

    def poll(self) -> Stall | None:
        """Write a sign of life and look for stalls; return one that has to end the run."""
        now = time.monotonic()
        if self._polled_at is not None and now - self._polled_at > _OWN_PAUSE_S:
            self._next.forgive(now)
        self._polled_at = now
        doing = self._activity.now()
        self._write(doing.section, doing.iteration)
        self._next.hear(self.beat_of(self._next.rank), now)
        stall = self._next.stall(now) or self._own_stall(doing)
        self._tell(stall)
        self._show()
        return stall if stall is not None and stall.is_final else None

    def close(self) -> None:
        """Note in the store that this rank leaves, so that its silence is no stall."""
        self._write(CLOSED, 0)
        self._tell(None)

    def beat_of(self, rank: int) -> Beat | None:
        """Return the last sign of life of a rank; None before its first one."""
        key = f"megatron/beat/{rank}"
        return Beat.parse(self._store.get(key)) if self._store.check([key]) else None

    def _write(self, section: str, iteration: int) -> None:
        self._number += 1
        limit = self._activity.step_limit(self._limits.named_s) or self._limits.named_s
        beat = Beat(self._number, section, iteration, limit, self._process)
        self._store.set(f"megatron/beat/{self._rank}", beat.encode())

    def _own_stall(self, doing: Doing) -> Stall | None:
        """Return the stall of this rank: it is within a step for too long, by its own doing."""
        limit = self._activity.step_limit(self._limits.named_s)
        # Evaluations and saves take as long as they take.
        if doing.section not in (STEP, DATA) or limit is None or doing.seconds < limit:
            return None
        still_s, waits_for = self._limits.still_s, main_thread_waits_for()
        final = None if still_s is None else max(still_s, 2 * limit)
        is_final = final is not None and doing.seconds >= final
        if waits_for is None:
            text = f"no progress for {doing.seconds:.0f} s, in {doing}: {main_thread_place()}"
        elif final is None or doing.seconds < _LAST * final or self._store.check([_STALL]):
            return None  # the rank that it waits for has more to say
        else:
            text = f"waits for {waits_for} since {doing.seconds:.0f} s, in {doing}"
        return Stall(
            self._rank, f"{text} ({self._process})", self._process, doing.seconds, is_final
        )

    def _tell(self, stall: Stall | None) -> None:
        """Write a stall into the store, unless another is there; take it back when it is over."""
        if stall is None:
            if self._announced is not None:
                self._store.delete_key(_STALL)
                self._store.delete_key(_ASKED)
                log.error(f"{self._announced} goes on")
                self._announced = None
            return
        if self._announced is None:
            silent = None if stall.rank == self._rank else stall.process
            record = Failure(stall.rank, stall.message, self._rank, silent).encode()
            if Failure.parse(self._store.compare_set(_STALL, "", record)).by == self._rank:
                self._announced = f"rank {stall.rank}"

    def _show(self) -> None:
        """Print the stacks of this process once for each stall that any rank has found.

        The first rank on the machine of a silent one prints those of that one too.
        """
        if not self._store.check([_STALL]):
            self._shown = None
            return
        stall = Failure.parse(self._store.get(_STALL))
        if self._shown == stall:
            return
        self._shown = stall
        waits_for = main_thread_waits_for()
        here = f"waits for {waits_for}" if waits_for else f"is at {main_thread_place()}"
        found = f"{stall.name}: {stall.message}"
        log.error(
            f"the run has stalled: {found}\nthis rank {here}\n{thread_stacks()}\n"
            f"{native_stacks.native_stacks()}"
        )
        silent = stall.process
        if silent is None or stall.rank == self._rank or not silent.is_here:
            return
        if self._store.add(_ASKED, 1) == 1:  # the first rank of its machine
            log.error(f"{stall.name} was here:\n{native_stacks.stacks_of(silent)}")


def _silent_limits(beat: Beat, limits: StallLimits) -> tuple[float, float | None]:
    """Return after how many silent seconds a rank is named, and after how many the run ends."""
    if beat.section in (START, END):
        return _NAMED_BEFORE_END * limits.start_s, limits.start_s
    named = max(limits.named_s, beat.limit_s)
    return named, None if limits.silent_s is None else max(limits.silent_s, 2 * named)
