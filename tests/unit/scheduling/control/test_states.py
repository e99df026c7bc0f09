"""Tests of megatron.scheduling.control.states."""

from itertools import product

from megatron.scheduling.control.states import (
    EDGES,
    CommandKind,
    Outcome,
    ServingState,
    TransitionKind,
    outcome_of,
)

SHOWN = [*map(str, ServingState), *(edge.shown for edge in EDGES.values())]
TRANSITIONS = [kind for kind in TransitionKind if kind is not TransitionKind.START]


def test_every_command_has_an_outcome_in_every_state() -> None:
    for shown, command in product(SHOWN, CommandKind):
        assert isinstance(outcome_of(shown, command), Outcome)


def test_status_is_always_answered() -> None:
    assert {outcome_of(shown, CommandKind.STATUS) for shown in SHOWN} == {Outcome.ALREADY}


def test_in_a_stable_state_a_transition_begins_where_its_edge_does_and_nowhere_else() -> None:
    for state, kind in product(ServingState, TRANSITIONS):
        outcome, edge = outcome_of(state, CommandKind(kind)), EDGES[kind]
        if state in edge.sources:
            assert outcome is Outcome.START
        elif state is edge.target:
            assert outcome is Outcome.ALREADY
        else:
            assert outcome is Outcome.WRONG_STATE


def test_in_a_transition_the_same_command_joins_stop_supersedes_and_others_wait() -> None:
    for made, kind in product(TransitionKind, TRANSITIONS):
        outcome = outcome_of(EDGES[made].shown, CommandKind(kind))
        if made is kind:
            assert outcome is Outcome.JOIN
        elif kind is TransitionKind.STOP:
            assert outcome is Outcome.SUPERSEDE
        elif made is TransitionKind.STOP:
            assert outcome is Outcome.WRONG_STATE
        else:
            assert outcome is Outcome.BUSY


def test_requests_are_taken_while_running_and_ended_while_there_are_any() -> None:
    taken = {shown for shown in SHOWN if outcome_of(shown, CommandKind.SUBMIT) is Outcome.ROUTE}
    assert taken == {"running"}
    not_found = {
        shown for shown in SHOWN if outcome_of(shown, CommandKind.ABORT) is Outcome.NOT_FOUND
    }
    assert not_found == {"loading", "starting", "stopped"}
    others = set(SHOWN) - not_found
    assert {outcome_of(shown, CommandKind.ABORT) for shown in others} == {Outcome.ROUTE}


def test_new_weights_leave_the_state_as_it_is() -> None:
    for state in (ServingState.PAUSED, ServingState.SUSPENDED):
        assert EDGES[TransitionKind.NEW_WEIGHTS].target_from(state) is state
        assert EDGES[TransitionKind.RESUME].target_from(state) is ServingState.RUNNING
