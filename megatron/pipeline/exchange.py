"""Adds communication to orders of computation, so that no batch of it can wait forever.

Every message gets one tick of a clock that all stages share, and both its ends stand at that tick.
A stage's actions are sorted by ticks; hence, by induction over ticks, every batch is matched by
batches that are reached too, and between two stages messages are received in the order in which
they were sent. How long anything takes does not matter to either.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple

from megatron.pipeline.action import (
    COMMUNICATION,
    Action,
    ActionKind,
    Round,
    UnsoundScheduleError,
    needed,
    virtual_stage,
)


class Place(NamedTuple):
    """A computation, and its stage."""

    stage: int
    action: Action


class Timed(NamedTuple):
    """An action, and its tick; the two ends of a message have the same one."""

    tick: int
    action: Action


def with_ticks(
    orders: Sequence[Sequence[Round]], *, num_chunks: int
) -> tuple[tuple[Timed, ...], ...]:
    """Return one schedule per stage: the rounds of its order and their messages, with ticks.

    An output is sent at the end of its round. It is received as late as that allows: before the
    round that needs it, or, when the sender could go on before that, before the round that starts
    at the same tick as the sender's next one.

    Raises:
        UnsoundScheduleError: stages wait for each other's results in a circle.
    """
    clock = _start_ticks(orders, num_chunks)
    found: list[list[_Entry]] = [[] for _ in orders]
    for stage, order in enumerate(orders):
        for actions in order:
            tick = clock[Place(stage, actions[0])]
            found[stage] += [_Entry(tick, 1, i, 0, action) for i, action in enumerate(actions)]
    for message in _messages(orders, clock, num_chunks):
        # At both ends forward comes before backward, so that the messages match.
        backward = int(message.sent.action.kind is ActionKind.SEND_BACKWARD)
        for receives, (stage, action) in enumerate((message.sent, message.received)):
            found[stage].append(_Entry(message.tick, 0, receives, backward, action))
    return tuple(tuple(Timed(entry.tick, entry.action) for entry in sorted(each)) for each in found)


def matched_batches(timed: Sequence[Timed]) -> Iterator[tuple[Action, ...]]:
    """Yield one stage's schedule cut up as it is run: a computation alone, or messages of one tick.

    Of the messages of one tick every end stands in a batch of that tick, so that both ends of all
    of them are in reach once all stages have got there. That allows two exchanges for one batch:
    first the header, then the message.
    """
    for (_, communicates), run in groupby(timed, key=_batch_key):
        if communicates:
            yield tuple(entry.action for entry in run)
        else:
            yield from ((entry.action,) for entry in run)


def _batch_key(entry: Timed) -> tuple[int, bool]:
    return entry.tick, entry.action.kind in COMMUNICATION


def posted_early(plan: Sequence[tuple[Action, ...]]) -> tuple[tuple[Action, ...], ...]:
    """Return a stage's plan with messages before a computation that makes none of them.

    So what the computation after it needs can travel meanwhile. Messages are posted in the same
    order, and no more than one batch is under way: only where the one before it is waited for
    before this computation anyway is the next one posted there. Nothing waits longer: what the
    computation makes is sent at a later tick, on which no message of this one depends.
    """
    found: list[tuple[Action, ...]] = []
    under_way: tuple[Action, ...] = ()
    rest = list(plan)
    for at in range(len(rest)):
        step, following = rest[at], rest[at + 1] if at + 1 < len(rest) else ()
        if step[0].kind not in COMMUNICATION:
            if needed(step[0]) in under_way:
                under_way = ()
            follows = bool(following) and following[0].kind in COMMUNICATION
            if follows and not under_way and not _makes_any(step[0], following):
                rest[at], rest[at + 1] = step, following = following, step
        if step[0].kind in COMMUNICATION:
            under_way = step
        found.append(step)
    return tuple(found)


def _makes_any(computation: Action, messages: tuple[Action, ...]) -> bool:
    forward = computation.kind is ActionKind.FORWARD
    sent = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
    return computation._replace(kind=sent) in messages


class _Entry(NamedTuple):
    """An action, with the keys that sort it into its stage's schedule."""

    tick: int
    computes: int
    place: int  # of a computation in its round; of communication: 0 sends, 1 receives
    backward: int
    action: Action


class _Message(NamedTuple):
    tick: int
    sent: Place
    received: Place


def _messages(
    orders: Sequence[Sequence[Round]], clock: dict[Place, int], num_chunks: int
) -> Iterator[_Message]:
    """Yield every message of a step, and when it is exchanged."""
    for stage, order in enumerate(orders):
        next_starts = [clock[Place(stage, actions[0])] for actions in order[1:]]
        for actions, next_start in zip_longest(order, next_starts):
            for action in actions:
                user = _user_of(action, stage, len(orders), num_chunks)
                if user is None:
                    continue
                assert user.stage != stage, "one stage"  # noqa: S101  # invariant: build_schedule
                tick = clock[user] if next_start is None else min(clock[user], next_start)
                backward = action.kind is not ActionKind.FORWARD
                sent = ActionKind.SEND_BACKWARD if backward else ActionKind.SEND_FORWARD
                received = ActionKind.RECV_BACKWARD if backward else ActionKind.RECV_FORWARD
                yield _Message(
                    tick,
                    Place(stage, action._replace(kind=sent)),
                    Place(user.stage, user.action._replace(kind=received)),
                )


def _start_ticks(orders: Sequence[Sequence[Round]], num_chunks: int) -> dict[Place, int]:
    """Return the start of each computation if rounds take one tick and messages none."""
    clock: dict[Place, int] = {}
    reached, free_at = [0] * len(orders), [0] * len(orders)
    waiting = set(range(len(orders)))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            while reached[stage] < len(orders[stage]):
                actions = orders[stage][reached[stage]]
                ready = _ready_at(actions, stage, clock, len(orders), num_chunks)
                if ready is None:
                    break
                tick = max(ready, free_at[stage])
                clock.update({Place(stage, action): tick for action in actions})
                reached[stage], free_at[stage], moved = reached[stage] + 1, tick + 1, True
            else:
                waiting.discard(stage)
                moved = True
        if not moved:
            stuck = ", ".join(f"stage {s} at {orders[s][reached[s]][0]}" for s in sorted(waiting))
            raise UnsoundScheduleError(f"stages wait for each other's results: {stuck}")
    return clock


def _ready_at(
    actions: Round, stage: int, clock: dict[Place, int], num_stages: int, num_chunks: int
) -> int | None:
    """Return the tick at which the inputs of a round are there; None if one has no tick yet."""
    ready = 0
    for i, action in enumerate(actions):
        for need in _needs(action, stage, num_stages, num_chunks):
            if need.stage == stage and need.action in actions[:i]:
                continue
            if need not in clock:
                return None
            ready = max(ready, clock[need] + 1)
    return ready


def _needs(action: Action, stage: int, num_stages: int, num_chunks: int) -> list[Place]:
    """Return the computations whose results a computation uses."""
    kind, microbatch, chunk = action
    if kind is ActionKind.FORWARD:
        before = _neighbour(action, stage, num_stages, num_chunks, step=-1)
        return [] if before is None else [before]
    if kind is ActionKind.BACKWARD_WEIGHT:
        return [Place(stage, Action(ActionKind.BACKWARD_INPUT, microbatch, chunk))]
    own = Place(stage, Action(ActionKind.FORWARD, microbatch, chunk))
    after = _neighbour(action, stage, num_stages, num_chunks, step=1)
    return [own] if after is None else [own, after]


def _user_of(action: Action, stage: int, num_stages: int, num_chunks: int) -> Place | None:
    """Return the computation that receives the result of this one by message, if any."""
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return None
    step = 1 if action.kind is ActionKind.FORWARD else -1
    return _neighbour(action, stage, num_stages, num_chunks, step=step)


def _neighbour(
    action: Action, stage: int, num_stages: int, num_chunks: int, *, step: int
) -> Place | None:
    """Return the same computation one virtual stage further; None beyond the ends of the model."""
    at = virtual_stage(stage, action.chunk, num_stages) + step
    if not 0 <= at < num_stages * num_chunks:
        return None
    return Place(at % num_stages, action._replace(chunk=at // num_stages))
