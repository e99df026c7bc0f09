"""Tests of megatron.scheduling.control.member."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.control.member import (
    EngineFailure,
    EngineTask,
    JoinRequest,
    LeaseEnded,
    MemberEvent,
    MemberState,
    PrepareDone,
    TaskKind,
    take_part,
)
from megatron.scheduling.control.messages import (
    Ack,
    Decide,
    Dismissed,
    Failed,
    Hello,
    Joined,
    Lease,
    Nack,
    Phase,
    Prepare,
    RequestStart,
    Welcome,
)
from megatron.scheduling.control.states import EDGES, Mode, ServingState, TransitionKind
from tests.support.examples import examples

RANK, INCARNATION, TERM = 3, 7, 2
RUNNING = MemberState(
    RANK, INCARNATION, term=TERM, is_member=True, state=ServingState.RUNNING, epoch=4, committed=4
)


def prepare(
    epoch: int = 5, kind: TransitionKind = TransitionKind.PAUSE, term: int = TERM
) -> Prepare:
    target = EDGES[kind].target_from(ServingState.RUNNING)
    return Prepare(term, RANK, INCARNATION, epoch, kind, target, Mode.DEFAULT, 0, 0)


def decide(phase: Phase, epoch: int = 5) -> Decide:
    return Decide(TERM, RANK, INCARNATION, epoch, phase)


def after(state: MemberState, *events: MemberEvent) -> MemberState:
    for event in events:
        state = take_part(state, event).state
    return state


READY = after(RUNNING, prepare(), PrepareDone(5))


def test_a_transition_is_prepared_acknowledged_and_made() -> None:
    step = take_part(RUNNING, prepare())
    assert (step.messages, step.tasks) == ((), (EngineTask(TaskKind.PREPARE, prepare()),))
    assert not step.state.admits
    step = take_part(step.state, PrepareDone(5))
    assert step.messages == (Ack(RANK, INCARNATION, 5, Phase.PREPARE),)
    assert step.state.state is ServingState.RUNNING
    step = take_part(step.state, decide(Phase.COMMIT))
    assert step.messages == (Ack(RANK, INCARNATION, 5, Phase.COMMIT),)
    assert step.tasks == (EngineTask(TaskKind.APPLY, prepare()),)
    assert (step.state.state, step.state.epoch) == (ServingState.PAUSED, 5)


def test_what_is_repeated_is_acknowledged_again_and_done_once() -> None:
    for state, event, phase in (
        (READY, prepare(), Phase.PREPARE),
        (after(READY, decide(Phase.COMMIT)), decide(Phase.COMMIT), Phase.COMMIT),
        (after(READY, decide(Phase.ROLLBACK)), decide(Phase.ROLLBACK), Phase.ROLLBACK),
    ):
        step = take_part(state, event)
        assert step == (state, (Ack(RANK, INCARNATION, 5, phase),), ())


def test_a_preparation_that_is_not_done_is_not_acknowledged_and_not_committed() -> None:
    preparing = after(RUNNING, prepare())
    assert take_part(preparing, prepare()).messages == ()
    assert take_part(preparing, decide(Phase.COMMIT)) == (preparing, (), ())


def test_a_rollback_undoes_what_was_prepared_and_an_older_transition_too() -> None:
    for epoch in (5, 6):
        step = take_part(READY, decide(Phase.ROLLBACK, epoch))
        assert step.tasks == (EngineTask(TaskKind.UNDO, prepare()),)
        assert (step.state.state, step.state.epoch) == (ServingState.RUNNING, epoch)
        assert step.state.admits
    assert take_part(READY, decide(Phase.ROLLBACK, 4)).state == READY


def test_a_transition_that_has_ended_is_not_prepared_again() -> None:
    back = after(READY, decide(Phase.ROLLBACK))
    assert take_part(back, prepare()) == (back, (), ())
    assert take_part(READY, prepare(4)) == (READY, (), ())
    assert take_part(READY, decide(Phase.COMMIT, 6)) == (READY, (), ())


def test_a_newer_transition_takes_the_place_of_one_that_is_prepared() -> None:
    stop = prepare(6, TransitionKind.STOP)
    step = take_part(READY, stop)
    assert step.tasks == (EngineTask(TaskKind.UNDO, prepare()), EngineTask(TaskKind.PREPARE, stop))
    assert take_part(step.state, PrepareDone(5)) == (step.state, (), ())  # of the older one


def test_a_refusal_has_a_code_and_is_repeated() -> None:
    preparing = after(RUNNING, prepare())
    step = take_part(preparing, PrepareDone(5, "capacity", "no memory"))
    refusal = Nack(RANK, INCARNATION, 5, "capacity", "no memory")
    assert step.messages == (refusal,)
    assert step.state.prepared is None
    assert take_part(step.state, prepare()).messages == (refusal,)
    assert after(step.state, decide(Phase.ROLLBACK)).refusal is None


@pytest.mark.parametrize("kind", TransitionKind)
def test_a_transition_begins_only_in_its_states(kind: TransitionKind) -> None:
    for state in ServingState:
        step = take_part(dataclasses.replace(RUNNING, state=state), prepare(kind=kind))
        if state in EDGES[kind].sources:
            assert [task.kind for task in step.tasks] == [TaskKind.PREPARE]
        else:
            (refusal,) = step.messages
            assert isinstance(refusal, Nack)
            assert (refusal.code, refusal.detail) == (
                "wrong_state",
                f"{kind} does not begin in {state}",
            )


def test_a_rank_joins_with_the_state_of_the_others() -> None:
    fresh = MemberState(RANK, INCARNATION)
    assert take_part(fresh, JoinRequest()).messages == (Hello(RANK, INCARNATION),)
    welcome = Welcome(TERM, RANK, INCARNATION, ServingState.PAUSED, 9, 4)
    step = take_part(fresh, welcome)
    assert step.messages == (Joined(RANK, INCARNATION, 9),)
    assert not step.state.is_member  # before the coordinator has counted it
    joined = after(step.state, Lease(TERM, RANK, INCARNATION))
    assert (joined.state, joined.epoch, joined.weights) == (ServingState.PAUSED, 9, 4)
    assert take_part(joined, welcome) == (joined, (), ())  # a late copy


def test_a_dismissed_rank_begins_again_without_requests_as_another_incarnation() -> None:
    step = take_part(READY, Dismissed(TERM, RANK, INCARNATION, "lost"))
    assert step.state == MemberState(RANK, INCARNATION + 1, term=TERM)
    reset = EngineTask(TaskKind.RESET, detail="lost")
    assert step.tasks == (EngineTask(TaskKind.UNDO, prepare()), reset)
    late = Dismissed(TERM, RANK, INCARNATION, "lost")
    assert take_part(step.state, late) == (step.state, (), ())


def test_a_rank_without_a_lease_admits_nothing_until_it_is_heard_again() -> None:
    fenced = after(RUNNING, LeaseEnded())
    assert RUNNING.admits
    assert not fenced.admits
    assert after(fenced, Lease(TERM, RANK, INCARNATION)).admits


def test_an_engine_that_fails_says_so() -> None:
    step = take_part(READY, EngineFailure("no device"))
    assert step.messages == (Failed(RANK, INCARNATION, "no device"),)
    assert step.state.state is ServingState.FAILED


@pytest.mark.parametrize(
    "changes", [{"term": TERM - 1}, {"member": RANK + 1}, {"incarnation": INCARNATION - 1}]
)
def test_an_older_coordinator_and_messages_to_others_change_nothing(
    changes: dict[str, int],
) -> None:
    for event in (
        prepare(),
        decide(Phase.ROLLBACK),
        Dismissed(TERM, RANK, INCARNATION, "x"),
        Lease(TERM, RANK, INCARNATION),
        RequestStart(TERM, RANK, INCARNATION, "a"),
    ):
        for state in (RUNNING, READY):
            assert take_part(state, dataclasses.replace(event, **changes)) == (state, (), ())


def test_a_rank_that_a_new_coordinator_does_not_count_begins_again() -> None:
    welcome = Welcome(TERM + 1, RANK, INCARNATION, ServingState.LOADING, 0, 0)
    step = take_part(RUNNING, welcome)
    assert step.state == MemberState(RANK, INCARNATION + 1, term=TERM + 1)
    reason = "a new coordinator knows nothing of its requests"
    assert step.tasks == (EngineTask(TaskKind.RESET, detail=reason),)


def test_a_newer_coordinator_is_followed() -> None:
    state = after(RUNNING, prepare(term=TERM + 1))
    assert state.term == TERM + 1
    assert take_part(state, decide(Phase.ROLLBACK)) == (state, (), ())


EPOCHS = st.integers(0, 8)
EVENTS = st.one_of(
    st.builds(prepare, EPOCHS, st.sampled_from(TransitionKind), st.integers(1, 3)),
    st.builds(decide, st.sampled_from(Phase), EPOCHS),
    st.builds(PrepareDone, EPOCHS, st.sampled_from(("", "capacity"))),
    st.builds(
        lambda state, epoch: Welcome(TERM, RANK, INCARNATION, state, epoch, 0),
        st.sampled_from(ServingState),
        EPOCHS,
    ),
    st.sampled_from((JoinRequest(), LeaseEnded(), Lease(TERM, RANK, INCARNATION))),
)


@examples(400)
@given(events=st.lists(EVENTS, max_size=20))
def test_a_member_survives_any_message_and_undoes_or_applies_whatever_it_prepared(
    events: list[MemberEvent],
) -> None:
    state, open_work = RUNNING, 0
    for event in events:
        step = take_part(state, event)
        assert step.state.epoch >= state.epoch
        refused = isinstance(event, PrepareDone) and bool(event.code) and step.messages != ()
        works = [task.kind for task in step.tasks]
        open_work += (
            works.count(TaskKind.PREPARE) - works.count(TaskKind.UNDO) - works.count(TaskKind.APPLY)
        )
        open_work -= refused  # the engine has undone it
        assert open_work == (step.state.prepared is not None)
        state = step.state
