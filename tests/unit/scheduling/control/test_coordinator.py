"""Tests of megatron.scheduling.control.coordinator."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.control import coordinator as product_code
from megatron.scheduling.control.coordinator import coordinate
from megatron.scheduling.control.coordinator_state import (
    ClientCommand,
    CoordinatorState,
    MemberLost,
    PrepareTimeout,
    Resend,
)
from megatron.scheduling.control.member import (
    JoinRequest,
    MemberEvent,
    MemberState,
    MemberStep,
    PrepareDone,
    TaskKind,
    take_part,
)
from megatron.scheduling.control.messages import (
    Ack,
    Command,
    Decide,
    Failed,
    Heartbeat,
    Hello,
    Joined,
    Nack,
    Phase,
    Prepare,
    RankAnswer,
)
from megatron.scheduling.control.states import (
    EDGES,
    Code,
    CommandKind,
    Mode,
    Outcome,
    ServingState,
    TransitionKind,
    outcome_of,
)
from tests.support.examples import examples
from tests.support.inference.cluster import Cluster
from tests.support.inference.model_checker import Budget, Found, ModelChecker

K, S = CommandKind, ServingState
CODES = {
    Outcome.ALREADY: Code.OK,
    Outcome.WRONG_STATE: Code.WRONG_STATE,
    Outcome.BUSY: Code.BUSY,
    Outcome.NOT_READY: Code.NOT_READY,
    Outcome.PAUSED: Code.PAUSED,
    Outcome.STOPPING: Code.STOPPING,
    Outcome.ENGINE_FAILED: Code.ENGINE_FAILED,
    Outcome.NOT_FOUND: Code.NOT_FOUND,
}


def never_done(member: int, epoch: int) -> PrepareDone | None:
    return None


def running(ranks: int = 2) -> Cluster:
    """Return an engine of ranks that each are a replica, and that is running."""
    cluster = Cluster(tuple(range(ranks)))
    cluster.start()
    assert cluster.coordinator.state is S.RUNNING
    return cluster


def shown_as(shown: str) -> Cluster:
    """Return an engine of two ranks that is shown as `shown`."""
    cluster = Cluster((0, 1))
    if shown == "loading":
        return cluster
    if shown == "starting":
        cluster.engine = never_done
        cluster.start()
        return cluster
    cluster.start()
    stable: dict[str, list[CommandKind]] = {
        "running": [],
        "paused": [K.PAUSE],
        "suspended": [K.PAUSE, K.SUSPEND],
        "stopped": [K.STOP],
    }
    making = {
        "pausing": ("running", K.PAUSE),
        "resuming": ("paused", K.RESUME),
        "suspending": ("paused", K.SUSPEND),
        "updating": ("paused", K.NEW_WEIGHTS),
        "stopping": ("running", K.STOP),
    }
    if shown == "failed":
        for rank in (0, 1):
            cluster.to_coordinator(Failed(rank, 1, "no device"))
        return cluster
    before, command = making.get(shown, (shown, None))
    for kind in stable[before]:
        assert cluster.ask(kind) is Code.OK
    if command is not None:
        cluster.engine = never_done
        assert cluster.ask(command, weights=1) is None
    return cluster


SHOWN = [*map(str, ServingState), *(edge.shown for edge in EDGES.values())]


@pytest.mark.parametrize("shown", SHOWN)
def test_every_command_in_every_state_has_the_outcome_of_the_table(shown: str) -> None:
    for command in CommandKind:
        cluster = shown_as(shown)
        assert cluster.coordinator.shown == shown
        before = cluster.coordinator.transition
        name = cluster.send(command, weights=1)
        outcome, after = outcome_of(shown, command), cluster.coordinator.transition
        if outcome in (Outcome.START, Outcome.SUPERSEDE):
            assert (
                after is None
                or after.epoch == (before.epoch if before else 0) + 1
                or (before is None and after.epoch > 0)
            )
            assert after is None or after.kind is TransitionKind(command)
            assert cluster.coordinator.shown in (EDGES[TransitionKind(command)].shown, "stopped")
        elif outcome is Outcome.JOIN:
            assert before is not None
            assert after is not None
            assert len(after.commands) == len(before.commands) + 1
        elif outcome is Outcome.ROUTE:
            assert [asked.command.id for asked in cluster.routed] == [name]
        else:
            assert cluster.code_of(name) is CODES[outcome]
            assert after == before


@pytest.mark.parametrize("shown", SHOWN)
def test_whatever_is_asked_in_whatever_state_every_command_is_answered_once(shown: str) -> None:
    for first, second in product((K.PAUSE, K.RESUME, K.SUSPEND, K.NEW_WEIGHTS, K.STOP), repeat=2):
        cluster = shown_as(shown)
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        names = [
            cluster.send(kind, weights=number) for number, kind in enumerate((first, second), 1)
        ]
        cluster.deliver()
        cluster.time_out()
        assert None not in [cluster.code_of(name) for name in names]
        assert cluster.coordinator.transition is None
        for member in cluster.members:
            if member.is_member:
                assert (member.state, member.prepared) == (cluster.coordinator.state, None)


class TestTransitions:
    def test_the_state_changes_when_all_have_committed_and_not_before(self) -> None:
        cluster = running()
        name = cluster.send(K.PAUSE)
        states = []
        while cluster.queue:
            states.append((cluster.coordinator.state, cluster.code_of(name)))
            to, message = cluster.queue.popleft()
            cluster.queue.appendleft((to, message))
            item = cluster.queue.popleft()
            cluster.to_coordinator(item[1]) if to is None else cluster.to_member(to, item[1])  # type: ignore[arg-type]
        assert set(states) == {(S.RUNNING, None)}
        assert [member.state for member in cluster.members] == [S.PAUSED] * 2
        assert (cluster.coordinator.state, cluster.code_of(name)) == (S.PAUSED, Code.OK)

    def test_a_rank_that_is_silent_is_named_and_all_are_back_in_the_state_before(self) -> None:
        cluster = running(3)
        cluster.silent = {1}
        name = cluster.send(K.PAUSE)
        cluster.deliver()
        assert cluster.code_of(name) is None
        cluster.to_coordinator(PrepareTimeout(cluster.coordinator.epoch))
        cluster.silent = set()
        cluster.time_out()
        answer = cluster.answer_of(name)
        assert (answer.code, answer.state, answer.detail) == (
            Code.TIMEOUT,
            "running",
            "rank 1: silent",
        )
        assert [rank.verdict for rank in answer.ranks] == ["ack", "silent", "ack"]
        assert all(member.admits for member in cluster.members)
        assert cluster.ask(K.PAUSE) is Code.OK

    def test_a_rank_that_refuses_is_named_with_its_reason(self) -> None:
        cluster = shown_as("suspended")
        cluster.engine = lambda member, epoch: (
            PrepareDone(epoch, "capacity", "4 of 9 blocks") if member else PrepareDone(epoch)
        )
        name = cluster.send(K.RESUME)
        cluster.deliver()
        answer = cluster.answer_of(name)
        assert (answer.code, answer.state) == (Code.REFUSED, "suspended")
        assert answer.ranks[1] == RankAnswer(1, "capacity", "4 of 9 blocks")
        assert answer.detail == "rank 1: capacity (4 of 9 blocks)"
        works = [task.kind for rank, task in cluster.tasks if rank == 0]
        assert works[-2:] == [TaskKind.PREPARE, TaskKind.UNDO]

    def test_a_decision_is_repeated_until_a_rank_knows_it_or_is_lost(self) -> None:
        cluster = running()
        name = cluster.send(K.PAUSE)
        while cluster.coordinator.transition.phase is Phase.PREPARE:  # type: ignore[union-attr]
            to, message = cluster.queue.popleft()
            cluster.to_coordinator(message) if to is None else cluster.to_member(to, message)  # type: ignore[arg-type]
        cluster.queue.clear()  # both commits are lost
        cluster.time_out()  # the time for the preparation is not that for the decision
        assert cluster.code_of(name) is Code.OK
        commits = [task for _, task in cluster.tasks if task.kind is TaskKind.APPLY]
        assert len(commits) == 2 + 2  # START and PAUSE, of both ranks

    def test_a_rank_lost_between_its_preparation_and_the_decision_is_named(self) -> None:
        cluster = running()
        name = cluster.send(K.PAUSE)
        cluster.silent = {1}
        cluster.deliver()
        cluster.lose(1)
        answer = cluster.answer_of(name)
        assert (answer.code, answer.detail) == (Code.OK, "rank 1: lost")
        assert cluster.coordinator.members == {0}

    def test_an_acknowledgement_of_another_transition_or_process_does_not_count(self) -> None:
        cluster = shown_as("pausing")
        epoch, before = cluster.coordinator.epoch, cluster.coordinator
        for rank in (0, 1):
            cluster.to_coordinator(Ack(rank, 1, epoch - 1, Phase.PREPARE))
            cluster.to_coordinator(Ack(rank, 0, epoch, Phase.PREPARE))
            cluster.to_coordinator(Ack(rank, 1, epoch, Phase.COMMIT))
            cluster.to_coordinator(Nack(rank, 1, epoch - 1, "capacity", ""))
        assert cluster.coordinator == before

    def test_stop_ends_a_pause_that_is_not_decided(self) -> None:
        cluster = shown_as("pausing")
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        assert cluster.ask(K.STOP) is Code.OK
        assert cluster.code_of("c1") is Code.SUPERSEDED
        assert [member.state for member in cluster.members] == [S.STOPPED] * 2

    def test_stop_waits_for_a_pause_that_is_decided(self) -> None:
        cluster = running()
        pause = cluster.send(K.PAUSE)
        cluster.silent = {1}
        cluster.to_coordinator(Ack(0, 1, 2, Phase.PREPARE))
        cluster.to_coordinator(Ack(1, 1, 2, Phase.PREPARE))
        cluster.queue.clear()
        stop = cluster.send(K.STOP)
        assert cluster.coordinator.shown == "pausing"
        for rank in (0, 1):
            cluster.to_coordinator(Ack(rank, 1, 2, Phase.COMMIT))
        assert cluster.code_of(pause) is Code.OK
        assert cluster.coordinator.shown == "stopping"
        assert cluster.code_of(stop) is None

    def test_stop_now_overrides_stop_after_draining(self) -> None:
        cluster = shown_as("stopping")
        assert cluster.coordinator.transition is not None
        assert cluster.coordinator.transition.mode is Mode.DRAIN
        name = cluster.send(K.STOP, Mode.NOW)
        assert cluster.coordinator.transition.mode is Mode.NOW
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        cluster.deliver()
        assert cluster.code_of("c1") is cluster.code_of(name) is Code.OK

    def test_the_same_pause_joins_and_another_one_is_told_what_is_being_made(self) -> None:
        cluster = shown_as("pausing")
        name = cluster.send(K.PAUSE, Mode.FREEZE)
        other = cluster.answer_of(cluster.send(K.PAUSE, Mode.ABORT))
        assert (other.code, other.detail) == (Code.BUSY, "pause freeze is being made")
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        for rank in (0, 1):
            cluster.to_member(rank, PrepareDone(cluster.coordinator.epoch))
        cluster.deliver()
        assert cluster.code_of("c1") is cluster.code_of(name) is Code.OK
        assert cluster.coordinator.epoch == 2  # one transition for both

    def test_resume_can_cancel_a_pause_that_is_not_decided(self) -> None:
        cluster = shown_as("pausing")
        assert cluster.ask(K.RESUME) is Code.BUSY
        assert cluster.ask(K.RESUME, cancel=True) is Code.OK
        assert cluster.code_of("c1") is Code.SUPERSEDED
        assert all(member.admits for member in cluster.members)

    def test_ranks_learn_where_new_weights_are_and_others_of_that_version_are_not_joined(
        self,
    ) -> None:
        cluster = shown_as("paused")
        cluster.silent = {1}
        cluster.send(K.NEW_WEIGHTS, weights=7, source="one")
        assert cluster.ask(K.NEW_WEIGHTS, weights=7, source="another") is Code.BUSY
        assert cluster.ask(K.NEW_WEIGHTS, weights=7, source="one") is None  # it has joined
        prepare = cluster.members[0].prepared
        assert prepare is not None
        assert prepare.source == "one"

    def test_new_weights_are_counted_and_older_ones_refused(self) -> None:
        cluster = shown_as("paused")
        assert cluster.ask(K.NEW_WEIGHTS, weights=7) is Code.OK
        assert [member.weights for member in cluster.members] == [7, 7]
        assert cluster.coordinator.state is S.PAUSED
        answer = cluster.answer_of(cluster.send(K.NEW_WEIGHTS, weights=7))
        assert (answer.code, answer.detail) == (
            Code.BAD_COMMAND,
            "weights 7 are not newer than 7",
        )

    @pytest.mark.parametrize(
        ("values", "detail"),
        [({"mode": Mode.NOW}, "pause has no mode now"), ({"remaining_ms": -1}, "its time is over")],
    )
    def test_a_command_without_a_meaning_is_answered_with_why(
        self, values: dict[str, object], detail: str
    ) -> None:
        cluster = running()
        answer = cluster.answer_of(cluster.send(K.PAUSE, **values))  # type: ignore[arg-type]
        assert (answer.code, answer.detail) == (Code.BAD_COMMAND, detail)

    def test_a_repeated_command_gets_the_same_answer_and_is_done_once(self) -> None:
        cluster = running()
        cluster.ask(K.PAUSE)
        cluster.ask(K.RESUME)
        epoch = cluster.coordinator.epoch
        cluster.to_coordinator(ClientCommand("client", Command("c1", K.PAUSE)))
        assert cluster.coordinator.epoch == epoch
        assert cluster.answers[-1] == cluster.answers[0]
        # Another client may have chosen the same id.
        cluster.to_coordinator(ClientCommand("other", Command("c1", K.PAUSE)))
        assert cluster.coordinator.epoch == epoch + 1

    def test_so_many_answers_are_remembered_and_so_many_commands_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(product_code, "REMEMBERED_ANSWERS", 3)
        monkeypatch.setattr(product_code, "MAX_WAITING_COMMANDS", 2)
        cluster = shown_as("pausing")
        codes = [cluster.code_of(cluster.send(K.PAUSE)) for _ in range(6)]
        assert codes == [None, *[Code.BUSY] * 5]
        assert len(cluster.coordinator.answers) == 3


class TestMembers:
    def test_an_engine_starts_when_all_ranks_have_joined_and_names_those_that_lack(self) -> None:
        cluster = Cluster((0, 0, 1))
        cluster.silent = {1}
        cluster.start()
        status = cluster.answer_of(cluster.send(K.STATUS))
        assert (status.state, status.detail) == ("loading", "ranks 0, 1 are missing")
        cluster.silent = set()
        cluster.start()
        assert cluster.coordinator.state is S.RUNNING
        assert [member.state for member in cluster.members] == [S.RUNNING] * 3

    def test_a_replica_is_lost_with_one_of_its_ranks_and_the_other_begins_again(self) -> None:
        cluster = Cluster((0, 0, 1))
        cluster.start()
        cluster.silent = {1}
        cluster.lose(1)
        assert cluster.coordinator.members == {2}
        assert cluster.coordinator.state is S.RUNNING
        assert not cluster.members[0].is_member
        reason = "rank 1 of its replica is lost"
        assert (0, (TaskKind.RESET, None, reason)) in cluster.tasks
        cluster.restart(1)
        cluster.start()
        assert cluster.coordinator.members == {0, 1, 2}
        assert cluster.members[0].admits

    def test_a_rank_that_comes_back_takes_the_state_of_the_others(self) -> None:
        cluster = running()
        cluster.lose(1)
        assert cluster.ask(K.PAUSE) is Code.OK
        cluster.restart(1)
        assert cluster.coordinator.members == {0, 1}
        assert cluster.members[1].state is S.PAUSED
        assert cluster.ask(K.RESUME) is Code.OK
        assert cluster.members[1].state is S.RUNNING

    def test_an_older_process_of_a_rank_is_dismissed_and_a_newer_one_replaces_it(self) -> None:
        cluster = running()
        cluster.restart(1)
        assert cluster.coordinator.incarnations == (1, 101)
        cluster.to_coordinator(Hello(1, 5))
        (_, message), *_ = [item for item in cluster.queue if item[0] == 1]
        assert "a newer process has this rank" in str(message)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_a_rank_that_the_engine_does_not_have_is_dismissed(self, rank: int) -> None:
        cluster = running()
        before = cluster.coordinator
        cluster.to_coordinator(Hello(rank, 1))
        assert f"there is no rank {rank} of 2" in str(cluster.queue.pop())
        assert cluster.coordinator == before

    @pytest.mark.parametrize("state", ["stopped", "failed"])
    def test_an_engine_that_has_ended_takes_no_new_ranks(self, state: str) -> None:
        cluster = shown_as(state)
        cluster.to_coordinator(Hello(1, 100))
        assert f"the engine is {state}" in str(cluster.queue.pop())

    def test_without_any_rank_the_coordinator_lives_and_says_so(self) -> None:
        cluster = shown_as("pausing")
        cluster.lose(0)
        cluster.lose(1)
        assert cluster.code_of("c1") is Code.ENGINE_LOST
        assert cluster.ask(K.SUBMIT, request="a") is Code.NOT_READY
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        for rank in (0, 1):
            cluster.restart(rank)
        assert cluster.coordinator.state is S.RUNNING

    def test_a_start_that_fails_is_named_and_tried_again_with_a_heartbeat(self) -> None:
        cluster = Cluster((0, 1), engine=lambda member, epoch: PrepareDone(epoch, "capacity"))
        cluster.start()
        status = cluster.answer_of(cluster.send(K.STATUS))
        assert status.state == "loading"
        assert status.detail == "the start failed: rank 0: capacity"
        assert cluster.ask(K.RESUME) is Code.WRONG_STATE
        cluster.engine = lambda member, epoch: PrepareDone(epoch)
        cluster.to_coordinator(Heartbeat(0, 1, S.LOADING, 1, 0, 0, 9))
        cluster.deliver()
        status = cluster.answer_of(cluster.send(K.STATUS))
        assert (status.state, status.detail) == ("running", "")

    def test_stop_succeeds_when_the_ranks_that_should_stop_are_gone(self) -> None:
        cluster = shown_as("stopping")
        cluster.lose(0)
        cluster.lose(1)
        assert cluster.code_of("c1") is Code.OK
        assert cluster.coordinator.state is S.STOPPED

    def test_a_heartbeat_renews_the_lease_of_members_only(self) -> None:
        cluster = running()
        cluster.to_coordinator(Heartbeat(0, 1, S.RUNNING, 1, 0, 0, 9))
        assert type(cluster.queue.pop()[1]).__name__ == "Lease"
        cluster.to_coordinator(Heartbeat(0, 0, S.RUNNING, 1, 0, 0, 9))
        assert type(cluster.queue.pop()[1]).__name__ == "Dismissed"
        cluster.to_coordinator(Heartbeat(1, 1, S.FAILED, 1, 0, 0, 9))
        assert cluster.coordinator.members == {0}
        cluster.queue.clear()
        cluster.to_coordinator(Heartbeat(1, 1, S.RUNNING, 1, 0, 0, 9))
        assert type(cluster.queue.pop()[1]).__name__ == "Dismissed"


class TestEightFailures:
    """What other coordinators were seen to do, on the simulated network."""

    def test_1_a_client_that_comes_before_the_ranks_is_not_counted_as_one(self) -> None:
        cluster = Cluster((0, 1))
        status = cluster.answer_of(cluster.send(K.STATUS))
        assert (status.state, status.detail) == ("loading", "ranks 0, 1 are missing")
        assert cluster.ask(K.SUBMIT, request="a") is Code.NOT_READY
        cluster.start()
        assert cluster.ask(K.SUBMIT, request="a") is None
        assert len(cluster.routed) == 1

    def test_5_suspend_while_running_is_answered_and_changes_nothing(self) -> None:
        cluster = running()
        before = cluster.coordinator
        assert cluster.code_of(cluster.send(K.SUSPEND)) is Code.WRONG_STATE
        assert dataclasses.replace(cluster.coordinator, answers=()) == before

    def test_6_pause_and_suspend_at_once_are_one_ok_and_one_busy(self) -> None:
        cluster = running()
        pause, suspend = cluster.send(K.PAUSE), cluster.send(K.SUSPEND)
        assert cluster.answer_of(suspend).epoch == cluster.coordinator.epoch
        cluster.deliver()
        assert (cluster.code_of(pause), cluster.code_of(suspend)) == (Code.OK, Code.BUSY)
        assert cluster.ask(K.SUSPEND) is Code.OK

    def test_7_without_engines_a_request_is_answered(self) -> None:
        cluster = running()
        for rank in (0, 1):
            cluster.lose(rank)
        assert cluster.ask(K.SUBMIT, request="a") is Code.NOT_READY

    @pytest.mark.parametrize("lost", range(6))
    def test_8_whichever_message_of_the_start_is_lost_the_engine_starts(self, lost: int) -> None:
        cluster = Cluster((0, 1))
        cluster.to_member(0, JoinRequest())
        cluster.to_member(1, JoinRequest())
        count = 0
        while cluster.queue:
            if count == lost:
                cluster.queue.popleft()
            count += 1
            if cluster.queue:
                to, message = cluster.queue.popleft()
                cluster.to_coordinator(message) if to is None else cluster.to_member(to, message)  # type: ignore[arg-type]
        cluster.start()
        if cluster.coordinator.transition is not None:
            cluster.to_coordinator(Resend(cluster.coordinator.transition.epoch))
            cluster.deliver()
        assert cluster.coordinator.state is S.RUNNING


RANKS = st.integers(-1, 3)
EPOCHS = st.integers(0, 6)
EVENTS = st.one_of(
    st.builds(
        ClientCommand,
        st.sampled_from(("a", "b")),
        st.builds(
            Command,
            id=st.sampled_from("xyz"),
            command=st.sampled_from(CommandKind),
            mode=st.sampled_from(Mode),
            weights=st.integers(0, 2),
            remaining_ms=st.integers(-1, 1),
            cancel=st.booleans(),
        ),
    ),
    st.builds(PrepareTimeout, EPOCHS),
    st.builds(Resend, EPOCHS),
    st.builds(MemberLost, RANKS),
    st.builds(Hello, RANKS, st.integers(0, 3)),
    st.builds(Joined, RANKS, st.integers(0, 3), EPOCHS),
    st.builds(Ack, RANKS, st.integers(0, 3), EPOCHS, st.sampled_from(Phase)),
    st.builds(Nack, RANKS, st.integers(0, 3), EPOCHS, st.just("capacity"), st.just("")),
    st.builds(Failed, RANKS, st.integers(0, 3), st.just("")),
    st.builds(Heartbeat, RANKS, st.integers(0, 3), st.sampled_from(S), EPOCHS, *[st.just(0)] * 3),
)


@examples(600)
@given(events=st.lists(EVENTS, max_size=40))
def test_the_coordinator_survives_any_message_in_any_state(events: list[object]) -> None:
    cluster = running(3)
    state, epoch = cluster.coordinator, cluster.coordinator.epoch
    for event in events:
        state, _ = coordinate(state, event)  # type: ignore[arg-type]
        assert state.epoch >= epoch
        epoch = state.epoch
        assert state.transition is None or not state.members <= state.transition.acks
        assert state.state is S.LOADING or state.members or state.state in (S.STOPPED, S.FAILED)


def checked(
    ranks: int, commands: str, *, keeps_order: bool = False, start: bool = False, **changes: object
) -> Found:
    """Search all states of an engine of `ranks` ranks; `start`: before they have joined."""
    asked = tuple(
        Command(str(number), CommandKind(name)) for number, name in enumerate(commands.split())
    )
    budget = Budget(**{key: changes.pop(key) for key in Budget._fields if key in changes})  # type: ignore[arg-type]
    checker = ModelChecker(asked, budget, keeps_order=keeps_order, **changes)  # type: ignore[arg-type]
    everybody = tuple(range(ranks))
    if start:
        loading = CoordinatorState(1, everybody, (-1,) * ranks)
        return checker.search(loading, tuple(MemberState(rank, 0) for rank in everybody))
    coordinator = CoordinatorState(
        1, everybody, (0,) * ranks, members=frozenset(everybody), state=S.RUNNING
    )
    members = (MemberState(rank, 0, is_member=True, state=S.RUNNING) for rank in everybody)
    return checker.search(coordinator, tuple(members))


class TestEveryInterleaving:
    @pytest.mark.parametrize(
        ("ranks", "commands", "options"),
        [
            (2, "pause", {"losses": 1, "copies": 1}),
            (2, "pause", {"losses": 1, "refusals": 1}),
            (2, "pause suspend", {"keeps_order": True, "crashes": 1}),
            (3, "pause suspend", {"keeps_order": True, "losses": 1}),
            (2, "", {"start": True, "keeps_order": True}),
        ],
    )
    def test_of_small_engines_ends_in_one_state_with_every_command_answered(
        self, ranks: int, commands: str, options: dict[str, object]
    ) -> None:
        found = checked(ranks, commands, **options)  # type: ignore[arg-type]
        assert found.problem is None, "\n".join(found.trace)
        assert found.states > 900

    @pytest.mark.wide
    @pytest.mark.parametrize(
        ("ranks", "commands", "options"),
        [
            (3, "pause suspend stop", {"keeps_order": True, "losses": 1}),
            (3, "pause", {"losses": 1}),
            (2, "pause", {"losses": 1, "copies": 1, "crashes": 1}),
            (2, "pause suspend", {}),
            (2, "", {"start": True, "keeps_order": True, "crashes": 1}),
            (2, "pause", {"start": True, "keeps_order": True, "crashes": 1}),
        ],
    )
    def test_of_larger_engines_does_too(
        self, ranks: int, commands: str, options: dict[str, object]
    ) -> None:
        found = checked(ranks, commands, **options)  # type: ignore[arg-type]
        assert found.problem is None, "\n".join(found.trace)

    def test_a_coordinator_that_moves_when_it_sends_is_found(self) -> None:
        def early(state: CoordinatorState, event: object) -> object:
            after, sends = coordinate(state, event)  # type: ignore[arg-type]
            if after.transition is not None and after.transition.phase is Phase.PREPARE:
                after = dataclasses.replace(after, state=after.transition.target)
            return after, sends

        found = checked(2, "pause", coordinate=early)
        assert found.problem == "the coordinator's state is not that of every member"

    def test_a_coordinator_without_a_time_limit_is_found(self) -> None:
        def patient(state: CoordinatorState, event: object) -> object:
            ignored = isinstance(event, PrepareTimeout | Resend)
            return (state, ()) if ignored else coordinate(state, event)  # type: ignore[arg-type]

        found = checked(2, "pause", losses=1, coordinate=patient)
        assert found.problem == "a client waits for ever"

    def test_a_member_that_takes_an_old_transition_is_found(self) -> None:
        def forgetful(state: MemberState, event: MemberEvent) -> MemberStep:
            if isinstance(event, Prepare) and state.prepared is None:
                state = dataclasses.replace(state, epoch=0)
            return take_part(state, event)

        found = checked(2, "pause", copies=1, take_part=forgetful)
        assert found.problem == "members end one transition in two states"

    def test_a_member_that_rolls_back_one_exact_transition_only_is_found(self) -> None:
        def exact(state: MemberState, event: MemberEvent) -> MemberStep:
            step = take_part(state, event)
            is_rollback = isinstance(event, Decide) and event.phase is Phase.ROLLBACK
            prepared = state.prepared
            if is_rollback and prepared is not None and prepared.epoch != event.epoch:
                kept = dataclasses.replace(step.state, prepared=prepared, is_ready=state.is_ready)
                return step._replace(state=kept)
            return step

        found = checked(2, "pause stop", take_part=exact)
        assert found.problem == "a member waits for the decision of a transition that has ended"
        assert len(found.trace) <= 12  # breadth first: a short way to the error
