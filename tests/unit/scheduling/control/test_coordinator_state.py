"""Tests of megatron.scheduling.control.coordinator_state."""

import dataclasses

from megatron.scheduling.control.coordinator_state import Transition, new_coordinator
from megatron.scheduling.control.messages import Phase
from megatron.scheduling.control.states import Mode, ServingState, TransitionKind


def test_a_new_coordinator_lacks_every_rank_and_has_seen_none() -> None:
    state = new_coordinator((0, 0, 1), term=4, weights=2)
    assert (state.term, state.weights, state.state) == (4, 2, ServingState.LOADING)
    assert state.missing == [0, 1, 2]
    assert state.incarnations == (-1, -1, -1)
    assert dataclasses.replace(state, members=frozenset({1})).missing == [0, 2]


def test_an_engine_is_shown_as_its_state_or_as_the_transition_that_is_made() -> None:
    state = dataclasses.replace(new_coordinator((0,)), state=ServingState.PAUSED)
    assert state.shown == "paused"
    transition = Transition(
        kind=TransitionKind.SUSPEND,
        epoch=1,
        target=ServingState.SUSPENDED,
        mode=Mode.DROP,
        weights=0,
        remaining_ms=0,
        phase=Phase.PREPARE,
        commands=(),
        participants=frozenset(),
    )
    assert dataclasses.replace(state, transition=transition).shown == "suspending"
