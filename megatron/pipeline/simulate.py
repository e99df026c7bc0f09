"""Simulate the schedules of all stages on a clock instead of on ranks, and check them.

Communication is as strict as it can be: a stage waits until its whole batch is done, a message is
done once both ends have posted it, and messages between two stages have no names: they match in the
order in which they were posted. What completes here completes on any transport.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megatron.pipeline.action import (
    COMMUNICATION,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    UnsoundScheduleError,
    batches,
    needed,
    peer_of,
    virtual_stage,
)
from megatron.pipeline.exchange import posted_early
from megatron.pipeline.schedule import build_schedule

_FORWARD_MESSAGES = frozenset({ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD})


class Durations(NamedTuple):
    """The time of each action, in any one unit; per chunk, where stages have several."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    communication: float = 0.0  # of one message, once both ends are there

    def of(self, kind: ActionKind) -> float:
        """Return the time of a computation."""
        if kind is ActionKind.BACKWARD:
            return self.backward_input + self.backward_weight
        return float(getattr(self, kind.value))


class Work(NamedTuple):
    """A computation, and its time."""

    action: Action
    start: float
    stop: float


class StageTrace(NamedTuple):
    """The work of one stage, and its peak of activations (micro-batches in a chunk)."""

    work: tuple[Work, ...]
    peak_activations: int  # alive from the forward until the last backward action
    peak_before_input_gradient: int  # alive until the input gradient: with all that it needs


class Simulation(NamedTuple):
    """One step of all stages."""

    stages: tuple[StageTrace, ...]
    makespan: float

    @property
    def bubble_share(self) -> float:
        """The part of the step, from 0 to 1, in which stages are idle."""
        busy = sum(work.stop - work.start for stage in self.stages for work in stage.work)
        return 1.0 - busy / (self.makespan * len(self.stages))


def simulate_schedule(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    durations: Durations = Durations(),  # noqa: B008  # immutable
    overlaps: bool = False,
) -> Simulation:
    """Return the times of one step of all stages under the schedule `name`; see `simulate`."""
    schedules = [
        build_schedule(
            name,
            stage=stage,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
        )
        for stage in range(num_stages)
    ]
    return simulate(
        schedules,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        durations=durations,
        overlaps=overlaps,
    )


def simulate(
    schedules: Sequence[Schedule],
    *,
    num_microbatches: int,
    num_chunks: int = 1,
    durations: Durations = Durations(),  # noqa: B008  # immutable
    batched: bool = True,
    overlaps: bool = False,
) -> Simulation:
    """Run one schedule per stage to the end, and return the times.

    Args:
        schedules: of all stages, in order.
        num_microbatches: of the step.
        num_chunks: of each stage.
        durations: of the actions.
        batched: neighbouring communication is posted together, as an executor must; False: each
            action on its own, to show what that leads to.
        overlaps: a stage posts a batch early (`posted_early`), and waits for it when it needs a
            message of it, or before it posts the next one; else at once.

    Raises:
        UnsoundScheduleError: work is missing, doubled or in a wrong order on a stage; two stages
            post messages in different orders; stages wait for each other forever.
    """
    forward_only = not any(
        action.kind not in COMMUNICATION and action.kind is not ActionKind.FORWARD
        for schedule in schedules
        for action in schedule
    )
    peaks = []
    for stage, schedule in enumerate(schedules):
        _check_complete(
            schedule,
            at=_Position(stage, len(schedules), num_chunks),
            num_microbatches=num_microbatches,
            forward_only=forward_only,
        )
        peaks.append(_peaks(schedule))
    clock = _Clock(schedules, durations, batched=batched, overlaps=overlaps)
    clock.run()
    stages = [StageTrace(tuple(work), *peak) for work, peak in zip(clock.work, peaks)]
    return Simulation(tuple(stages), max(clock.now))


class _Position(NamedTuple):
    stage: int
    num_stages: int
    num_chunks: int

    def is_first(self, chunk: int) -> bool:
        return virtual_stage(self.stage, chunk, self.num_stages) == 0

    def is_last(self, chunk: int) -> bool:
        at = virtual_stage(self.stage, chunk, self.num_stages)
        return at == self.num_stages * self.num_chunks - 1


def _check_complete(
    schedule: Schedule, *, at: _Position, num_microbatches: int, forward_only: bool
) -> None:
    """Check that every micro-batch is received, computed and sent once per chunk, in order."""
    done: dict[tuple[int, int], list[ActionKind]] = {
        (microbatch, chunk): []
        for microbatch in range(num_microbatches)
        for chunk in range(at.num_chunks)
    }
    for action in schedule:
        if (action.microbatch, action.chunk) not in done:
            raise UnsoundScheduleError(f"stage {at.stage} has no {action}")
        done[action.microbatch, action.chunk].append(action.kind)
    for (microbatch, chunk), kinds in done.items():
        split = ActionKind.BACKWARD not in kinds
        chains = _chains(at, chunk, forward_only=forward_only, split=split)
        expected = {kind for chain in chains for kind in chain}
        in_order = all([kind for kind in kinds if kind in chain] == chain for chain in chains)
        if len(kinds) != len(expected) or not in_order:
            raise UnsoundScheduleError(
                f"stage {at.stage}, micro-batch {microbatch}, chunk {chunk}: "
                f"{', '.join(kinds) or 'nothing'} is not each of {', '.join(sorted(expected))} "
                "once, in an order that works"
            )


def _chains(
    at: _Position, chunk: int, *, forward_only: bool, split: bool
) -> tuple[list[ActionKind], ...]:
    """Return the kinds that must occur in order for one micro-batch in one chunk."""
    first, last = at.is_first(chunk), at.is_last(chunk)
    forward = [] if first else [ActionKind.RECV_FORWARD]
    forward.append(ActionKind.FORWARD)
    sent = [] if last else [ActionKind.SEND_FORWARD]
    if forward_only:
        return ([*forward, *sent],)
    backward = [] if last else [ActionKind.RECV_BACKWARD]
    backward.append(ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD)
    returned = [] if first else [ActionKind.SEND_BACKWARD]
    weights = [ActionKind.BACKWARD_WEIGHT] if split else []
    return ([*forward, *sent, *backward, *returned], [*forward, *backward, *weights])


def _peaks(schedule: Schedule) -> tuple[int, int]:
    """Return the peaks of activations alive until the end of backward, and of input gradient."""
    whole = until_input = most_whole = most_until_input = 0
    for action in schedule:
        whole += action.kind is ActionKind.FORWARD
        until_input += action.kind is ActionKind.FORWARD
        most_whole, most_until_input = max(most_whole, whole), max(most_until_input, until_input)
        whole -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        until_input -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    return most_whole, most_until_input


class _Posted(NamedTuple):
    """One end of a message: its content, and the time since which the stage waits."""

    action: Action
    message: tuple[bool, int, int]  # forward?, micro-batch, virtual stage that receives
    since: float


class _Clock:
    """The simulated time of all stages, a result of maxima and sums in any order."""

    def __init__(
        self, schedules: Sequence[Schedule], durations: Durations, *, batched: bool, overlaps: bool
    ) -> None:
        self.count, self.durations, self._overlaps = len(schedules), durations, overlaps
        self.steps = [
            tuple(batches(schedule)) if batched else tuple((action,) for action in schedule)
            for schedule in schedules
        ]
        if overlaps:
            self.steps = [posted_early(steps) for steps in self.steps]
        self.now = [0.0] * self.count
        self.work: list[list[Work]] = [[] for _ in schedules]
        self._at = [0] * self.count  # the next step of each stage
        self._open = [0] * self.count  # messages of the last batch without a match
        self._arrival = [0.0] * self.count  # of those of them that have one
        self._posted: list[tuple[Action, ...]] = [()] * self.count  # them all
        self._waits = [False] * self.count
        self._sent: dict[tuple[int, int], deque[_Posted]] = {}
        self._received: dict[tuple[int, int], deque[_Posted]] = {}
        self._ready = list(range(self.count))

    def run(self) -> None:
        """Advance every stage until none can continue."""
        while self._ready:
            self._advance(self._ready.pop())
        stuck = [stage for stage in range(self.count) if self._open[stage]]
        if stuck:
            waits = "; ".join(
                f"stage {stage} in {', '.join(map(str, self._posted[stage]))}" for stage in stuck
            )
            raise UnsoundScheduleError(f"stages wait for each other forever: {waits}")

    def _advance(self, stage: int) -> None:
        while self._at[stage] < len(self.steps[stage]):
            step = self.steps[stage][self._at[stage]]
            communicates = step[0].kind in COMMUNICATION
            needs = not self._overlaps or communicates or needed(step[0]) in self._posted[stage]
            if needs and not self._land(stage):
                return
            self._at[stage] += 1
            if communicates:
                self._post(stage, step)
                continue
            start = self.now[stage]
            self.now[stage] = start + self.durations.of(step[0].kind)
            self.work[stage].append(Work(step[0], start, self.now[stage]))
        self._land(stage)

    def _land(self, stage: int) -> bool:
        """Wait for the last batch of a stage; False: the last message to match makes it ready."""
        self._waits[stage] = self._open[stage] > 0
        if self._waits[stage]:
            return False
        self.now[stage] = max(self.now[stage], self._arrival[stage])
        self._posted[stage] = ()
        return True

    def _post(self, stage: int, batch: tuple[Action, ...]) -> None:
        self._open[stage] = len(batch)
        self._posted[stage] = batch
        since, pairs = self.now[stage], []
        for action in batch:
            peer = peer_of(action, stage, self.count)
            sends = action.kind in SENDS
            pair = (stage, peer) if sends else (peer, stage)
            queues = self._sent if sends else self._received
            posted = _Posted(action, self._message(action, stage, peer), since)
            queues.setdefault(pair, deque()).append(posted)
            pairs.append(pair)
        for pair in pairs:
            self._meet(pair)

    def _message(self, action: Action, stage: int, peer: int) -> tuple[bool, int, int]:
        forward = action.kind in _FORWARD_MESSAGES
        to = virtual_stage(stage, action.chunk, self.count)
        if action.kind not in RECEIVES:
            to += 1 if forward else -1
        return forward, action.microbatch, to

    def _meet(self, pair: tuple[int, int]) -> None:
        sent, received = self._sent.get(pair), self._received.get(pair)
        while sent and received:
            give, take = sent.popleft(), received.popleft()
            if give.message != take.message:
                raise UnsoundScheduleError(
                    f"stage {pair[0]} sends {give.action} where stage {pair[1]} expects "
                    f"{take.action}"
                )
            done = max(give.since, take.since) + self.durations.communication
            for stage in pair:
                self._arrival[stage] = max(self._arrival[stage], done)
                self._open[stage] -= 1
                if not self._open[stage] and self._waits[stage]:
                    self._ready.append(stage)
