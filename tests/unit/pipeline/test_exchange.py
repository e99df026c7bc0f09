"""Communication added to any order: where it stands, and which orders cannot have any."""

from collections import defaultdict
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import orders
from megatron.pipeline.action import (
    COMMUNICATION,
    SENDS,
    Action,
    ActionKind,
    Round,
    UnsoundScheduleError,
    peer_of,
)
from megatron.pipeline.exchange import matched_batches, with_ticks
from megatron.pipeline.orders import gpipe, one_forward_one_backward
from megatron.pipeline.simulate import Durations, simulate
from tests.support.examples import examples
from tests.support.stages import with_exchanges


def forward(microbatch: int, chunk: int = 0) -> Round:
    return (Action(ActionKind.FORWARD, microbatch, chunk),)


def backward(microbatch: int, chunk: int = 0) -> Round:
    return (Action(ActionKind.BACKWARD, microbatch, chunk),)


def test_a_lone_stage_communicates_with_nobody() -> None:
    (schedule,) = with_exchanges([gpipe(2)], num_chunks=1)
    assert schedule == tuple(action for actions in gpipe(2) for action in actions)


def test_1f1b_sends_what_it_has_with_what_it_needs_next() -> None:
    rounds = [one_forward_one_backward(stage, 2, 2) for stage in range(2)]
    first, last = with_exchanges(rounds, num_chunks=1)
    assert [f"{action.kind} {action.microbatch}" for action in first] == [
        "forward 0",
        "send_forward 0",
        "forward 1",
        "send_forward 1",
        "recv_backward 0",
        "backward 0",
        "recv_backward 1",
        "backward 1",
    ]
    assert [f"{action.kind} {action.microbatch}" for action in last] == [
        "recv_forward 0",
        "forward 0",
        "backward 0",
        "send_backward 0",
        "recv_forward 1",
        "forward 1",
        "backward 1",
        "send_backward 1",
    ]


def test_a_chunk_is_named_by_the_stage_that_acts() -> None:
    rounds = [[forward(0), forward(0, 1)]] * 2
    first, last = with_exchanges(rounds, num_chunks=2)
    assert first == (
        Action(ActionKind.FORWARD, 0, 0),
        Action(ActionKind.SEND_FORWARD, 0, 0),
        Action(ActionKind.RECV_FORWARD, 0, 1),
        Action(ActionKind.FORWARD, 0, 1),
        Action(ActionKind.SEND_FORWARD, 0, 1),
    )
    assert last == (
        Action(ActionKind.RECV_FORWARD, 0, 0),
        Action(ActionKind.FORWARD, 0, 0),
        Action(ActionKind.SEND_FORWARD, 0, 0),
        Action(ActionKind.RECV_FORWARD, 0, 1),
        Action(ActionKind.FORWARD, 0, 1),
    )


def test_an_input_that_comes_early_is_taken_when_its_sender_would_go_on() -> None:
    # Stage 0 goes on with micro-batch 1, while stage 1 does something else first with 0.
    rounds = [
        [forward(0), forward(1), backward(0), backward(1)],
        [forward(0), backward(0), forward(1), backward(1)],
        [forward(0), backward(0), forward(1), backward(1)],
    ]
    kinds = [action.kind for action in with_exchanges(rounds, num_chunks=1)[1]]
    # Received long before its forward: stage 0 is not kept from anything.
    assert kinds[:5] == [
        ActionKind.RECV_FORWARD,
        ActionKind.FORWARD,
        ActionKind.SEND_FORWARD,
        ActionKind.RECV_BACKWARD,
        ActionKind.BACKWARD,
    ]
    times = Durations(forward=1, backward_input=1, backward_weight=0)
    result = simulate(with_exchanges(rounds, num_chunks=1), num_microbatches=2, durations=times)
    assert result.makespan == 10


def test_stages_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    rounds = [
        [forward(0), backward(0), forward(1), backward(1)],
        [forward(0), forward(1), backward(1), backward(0)],
    ]
    with pytest.raises(
        UnsoundScheduleError, match="wait for each other's results: stage 0 at backward"
    ):
        with_exchanges(rounds, num_chunks=1)


def test_interleaving_with_a_short_last_group_would_be_such_a_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_stages() -> list[orders.Order]:
        return [orders.interleaved(stage, 4, 5, 2) for stage in range(4)]

    with_exchanges(all_stages(), num_chunks=2)
    monkeypatch.setattr(orders, "microbatch_groups", lambda batch, stages: (4, 1))
    with pytest.raises(UnsoundScheduleError, match="wait for each other's results"):
        with_exchanges(all_stages(), num_chunks=2)


def test_a_weight_gradient_waits_for_its_input_gradient() -> None:
    weights_first = [
        forward(0),
        (Action(ActionKind.BACKWARD_WEIGHT, 0, 0),),
        (Action(ActionKind.BACKWARD_INPUT, 0, 0),),
    ]
    with pytest.raises(UnsoundScheduleError, match=r"stage 0 at backward_weight\(0, chunk 0\)"):
        with_exchanges([weights_first], num_chunks=1)


@st.composite
def sound_orders(draw: st.DrawFn) -> tuple[int, int, int, list[list[Round]]]:
    """Any orders that can be computed at all: stages take a next computation at random."""
    stages, batch, chunks = (
        draw(st.integers(2, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    virtual = stages * chunks
    left = {("F", i, at) for i in range(batch) for at in range(virtual)}
    left |= {("B", i, at) for i in range(batch) for at in range(virtual)}
    rounds: list[list[Round]] = [[] for _ in range(stages)]
    while left:
        possible = sorted(
            (kind, i, at)
            for kind, i, at in left
            if (kind == "F" and ("F", i, at - 1) not in left)
            or (kind == "B" and ("F", i, at) not in left and ("B", i, at + 1) not in left)
        )
        kind, i, at = draw(st.sampled_from(possible))
        left.discard((kind, i, at))
        make = forward if kind == "F" else backward
        rounds[at % stages].append(make(i, at // stages))
    return stages, batch, chunks, rounds


@examples(150)
@given(sound_orders())
def test_any_order_that_can_be_computed_can_be_communicated(
    case: tuple[int, int, int, list[list[Round]]],
) -> None:
    _, batch, chunks, rounds = case
    schedules = with_exchanges(rounds, num_chunks=chunks)
    for order, schedule in zip(rounds, schedules):
        wanted = [action for actions in order for action in actions]
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        assert [action for action in schedule if action.kind in kinds] == wanted
    simulate(schedules, num_microbatches=batch, num_chunks=chunks)


@examples(150)
@given(sound_orders())
def test_the_messages_of_a_tick_meet_among_themselves(
    case: tuple[int, int, int, list[list[Round]]],
) -> None:
    """So one batch may be exchanged twice: how its messages look, then the messages."""
    stages, _, chunks, rounds = case
    timed = with_ticks(rounds, num_chunks=chunks)
    schedules = with_exchanges(rounds, num_chunks=chunks)
    by_tick: dict[int, dict[tuple[int, int], list[list[int]]]] = defaultdict(
        lambda: defaultdict(lambda: [[], []])
    )
    for stage, each in enumerate(timed):
        batches = list(matched_batches(each))
        assert tuple(chain.from_iterable(batches)) == schedules[stage]
        ticks = {entry.action: entry.tick for entry in each}
        for batch in batches:
            if batch[0].kind not in COMMUNICATION:
                assert len(batch) == 1
                continue
            (tick,) = {ticks[action] for action in batch}
            for action in batch:
                peer = peer_of(action, stage, stages)
                sends = action.kind in SENDS
                pair = (stage, peer) if sends else (peer, stage)
                by_tick[tick][pair][not sends].append(action.microbatch)
    for pairs in by_tick.values():
        for sent, received in pairs.values():
            assert sent == received
