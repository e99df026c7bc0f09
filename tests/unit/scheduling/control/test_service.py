"""Tests of megatron.scheduling.control.service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.control.messages import (
    Ack,
    Answer,
    Heartbeat,
    Hello,
    Lease,
    Phase,
    RequestAbort,
    RequestDone,
    RequestProgress,
    RequestStart,
    encode_message,
)
from megatron.scheduling.control.rank_service import RankService
from megatron.scheduling.control.service import ControlService
from megatron.scheduling.control.states import Code, CommandKind, Mode, ServingState
from tests.support.examples import examples
from tests.support.inference.service_network import TIMING, ServiceNetwork

K = CommandKind


def vars_of(message: RequestStart | RequestAbort) -> str | int:
    """What a message about a request has beside its name."""
    return message.payload if isinstance(message, RequestStart) else message.sample


def running(*replicas: int) -> ServiceNetwork:
    network = ServiceNetwork(replicas or (0, 1))
    network.start()
    return network


def last_answer(network: ServiceNetwork, client: str) -> Answer:
    answer = network.got[client][-1]
    assert isinstance(answer, Answer)
    return answer


class TestEightFailures:
    """What other coordinators were seen to do, with bytes and a clock."""

    def test_1_a_client_is_not_counted_as_a_rank(self) -> None:
        network = ServiceNetwork((0, 1), dead={1})
        assert network.ask("a", K.STATUS) is Code.OK
        assert last_answer(network, "a").detail == "ranks 0, 1 are missing"
        network.pass_time(2.0)
        network.ask("a", K.STATUS)
        assert last_answer(network, "a").detail == "ranks 1 are missing"
        network.dead = set()
        network.start()
        assert network.ask("a", K.SUBMIT, request="u") is Code.ACCEPTED

    @examples(100)
    @given(junk=st.lists(st.binary(max_size=60), min_size=1, max_size=10))
    def test_2_bytes_that_are_no_message_are_refused_to_their_connection_only(
        self, junk: list[bytes]
    ) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        network.service.connect("bad")
        for data in junk:
            network.send("bad", data)
        assert network.service.counts["malformed"] == len(junk)
        assert [one.code for one in network.got["bad"] if isinstance(one, Answer)] == (
            [Code.BAD_COMMAND] * len(junk)
        )
        network.finish(0, "u")
        assert network.ends_of("a") == [("u", "completed")]

    def test_3_a_client_that_closes_early_is_dropped_and_counted_and_others_go_on(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        network.to_connections(network.service.disconnect("a", network.now_ns))
        assert network.requests[0] == ["start u", "abort u"]
        network.finish(0, "u")
        for number in range(10):
            assert network.ask("b", K.SUBMIT, request=f"v{number}") is Code.ACCEPTED
            network.finish(number % 2, f"v{number}")
            network.finish((number + 1) % 2, f"v{number}")
        assert len(network.ends_of("b")) == 10
        network.service.connect("c")
        pause = network.ask("c", K.PAUSE, Mode.DRAIN)
        assert pause is Code.OK
        assert network.ends_of("a") == []

    def test_3_an_answer_that_nobody_is_there_to_get_is_counted(self) -> None:
        network = running()
        network.busy = {0, 1}
        network.ask("a", K.PAUSE)
        network.service.disconnect("a", network.now_ns)
        before = network.service.counts["unroutable"]
        network.pass_time(12.0)
        assert network.service.state.shown == "running"
        assert network.service.counts["unroutable"] == before + 1

    def test_4_requests_of_a_rank_that_died_are_moved_or_fail_within_its_lease(self) -> None:
        network = running()
        for name in ("u", "v", "w", "x"):
            network.ask("a", K.SUBMIT, request=name)
        assert network.requests == {0: ["start u", "start w"], 1: ["start v", "start x"]}
        progress = RequestProgress(1, network.ranks[1].state.incarnation, "v", "a token")
        network.send("rank 1", encode_message(progress))
        assert network.got["a"][-1] == progress
        network.dead = {1}
        network.pass_time(TIMING.lease_ns / 1e9 + 1.0)
        assert network.ends_of("a") == [("v", "failed")]
        assert network.requests[0] == ["start u", "start w", "start x"]
        late = RequestProgress(1, network.ranks[1].state.incarnation, "x", "another's token")
        network.send("rank 1", encode_message(late))
        assert late not in network.got["a"]
        for name in ("u", "w", "x"):
            network.finish(0, name)
        assert len(network.ends_of("a")) == 4

    def test_what_a_request_asks_for_comes_to_its_replica_and_to_the_next_one(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        network.ask("a", K.SUBMIT, request="v", payload="a prompt")
        network.ask("a", K.ABORT, request="v", sample=2)
        network.dead = {1}
        network.pass_time(TIMING.lease_ns / 1e9 + 1.0)
        network.ask("a", K.ABORT, request="v")
        taken = [(one.request, vars_of(one)) for one in network.taken]
        assert taken == [
            ("u", ""),
            ("v", "a prompt"),
            ("v", 2),
            ("v", "a prompt"),
            ("v", -1),
        ]

    def test_5_suspend_while_running_is_answered_at_once(self) -> None:
        network = running()
        assert network.ask("a", K.SUSPEND) is Code.WRONG_STATE
        assert network.service.state.shown == "running"

    def test_6_pause_and_suspend_at_once_with_busy_engines_are_both_answered(self) -> None:
        network = running()
        network.busy = {0}
        assert network.ask("a", K.PAUSE) is None
        assert network.ask("a", K.SUSPEND) is Code.BUSY
        network.pass_time(11.0)
        assert network.code_of("a", "c1") is Code.TIMEOUT
        network.busy = set()
        assert network.ask("a", K.PAUSE) is Code.OK
        assert network.ask("a", K.SUSPEND) is Code.OK

    def test_7_without_ranks_the_coordinator_lives_and_answers(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        network.dead = {0, 1}
        network.pass_time(5.0)
        assert network.ends_of("a") == [("u", "failed")]
        assert network.ask("a", K.SUBMIT, request="v") is Code.NOT_READY
        network.dead = set()
        network.start()
        assert network.ask("a", K.SUBMIT, request="v") is Code.ACCEPTED

    @examples(100)
    @given(lost=st.sets(st.integers(0, 30), max_size=8))
    def test_8_whichever_messages_of_the_start_are_lost_the_engine_starts(
        self, lost: set[int]
    ) -> None:
        network = ServiceNetwork((0, 0, 1))
        count = 0
        receive = network.service.receive

        def unreliable(connection: str, data: bytes, now_ns: int) -> list[object]:
            nonlocal count
            count += 1
            return [] if count - 1 in lost else receive(connection, data, now_ns)  # type: ignore[return-value]

        network.service.receive = unreliable  # type: ignore[assignment, method-assign]
        network.pass_time(20.0)
        assert network.service.state.shown == "running"
        assert all(rank.state.admits for rank in network.ranks)


class TestRanks:
    def test_a_stopped_process_fences_itself_is_removed_and_comes_back_empty(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        network.dead = {0}  # SIGSTOP
        network.pass_time(5.0)
        assert network.service.state.members == {1}
        network.dead = set()  # SIGCONT: it looks at the clock before it admits anything
        network.ranks[0].tick(network.now_ns)
        assert not network.ranks[0].state.admits
        network.pass_time(2.0)
        assert network.service.state.members == {0, 1}
        assert network.ranks[0].state.incarnation == 2
        network.finish(0, "u")  # what it says of requests that were moved does not count
        assert network.ends_of("a") == []
        network.finish(1, "u")
        assert network.ends_of("a") == [("u", "completed")]

    def test_a_rank_that_cannot_hear_fences_itself_before_its_requests_are_moved(self) -> None:
        network = running()
        network.service._connections.discard("rank 0")
        fenced_ns = None
        while 0 in network.service.state.members and network.now_ns < 10**11:
            network.pass_time(0.1)
            # The coordinator hears it, and goes on; it hears nothing, and admits nothing.
            if not network.ranks[0].state.admits:
                fenced_ns = network.now_ns
                break
        assert fenced_ns is not None
        assert fenced_ns <= 2_000_000_000 + TIMING.lease_ns

    def test_a_coordinator_that_was_started_again_gets_its_ranks_back(self) -> None:
        network = running(0, 0, 1)
        network.ask("a", K.PAUSE)
        network.service = ControlService(network.replicas, TIMING, term=2)
        for rank in range(3):
            network.service.connect(f"rank {rank}")
        network.pass_time(5.0)
        assert network.service.state.shown == "running"
        assert [rank.state.incarnation for rank in network.ranks] == [2, 2, 2]

    def test_a_coordinator_that_stood_still_does_not_remove_ranks_for_it(self) -> None:
        network = running()
        network.busy = {1}
        network.ask("a", K.PAUSE)
        network.now_ns += 60_000_000_000
        network.to_connections(network.service.tick(network.now_ns))
        assert network.service.state.members == {0, 1}
        assert network.service.state.shown == "pausing"
        network.dead = {0}
        network.pass_time(TIMING.lease_ns / 1e9 + 1.0)
        assert network.service.state.members == {1}

    def test_a_rank_with_a_new_connection_stays_a_member(self) -> None:
        network = running()
        network.service.connect("elsewhere")
        network.service.disconnect("rank 0", network.now_ns)
        for data in network.ranks[0].hello().data:
            network.send("elsewhere", data)
        assert isinstance(network.got["elsewhere"][-1], Lease)
        assert network.service.state.members == {0, 1}

    def test_a_message_in_the_name_of_a_rank_is_taken_from_its_connection_only(self) -> None:
        network = running()
        network.busy = {0, 1}
        network.ask("a", K.PAUSE)
        epoch = network.service.state.epoch
        for message in (
            Ack(0, 1, epoch, Phase.PREPARE),
            Ack(7, 1, epoch, Phase.PREPARE),
            Ack(-1, 1, epoch, Phase.PREPARE),
            Heartbeat(0, 1, ServingState.FAILED, epoch, 0, 0, 0),
            RequestDone(0, 1, "u", "completed"),
            RequestProgress(0, 1, "u"),
        ):
            before = network.service.state
            network.send("a", encode_message(message))
            assert network.service.state == before
            assert "this is not incarnation 1 of rank" in last_answer(network, "a").detail
        assert network.service.counts["not_from_member"] == 6

    def test_a_rank_that_does_not_exist_and_an_older_process_are_refused(self) -> None:
        network = running()
        network.service.connect("b")
        network.send("b", encode_message(Hello(2, 9)))
        assert last_answer(network, "b").detail == "there is no rank 2 of 2"
        network.send("b", encode_message(Hello(1, 0)))
        assert last_answer(network, "b").detail == "a newer process has rank 1"
        network.send("b", encode_message(Lease(1, 1, 1)))
        assert last_answer(network, "b").detail == "a coordinator takes no Lease"

    def test_a_process_that_was_started_again_replaces_the_former_one(self) -> None:
        network = running()
        network.ranks[1] = RankService(1, 100, TIMING)
        network.pass_time(3.0)
        assert network.service.state.incarnations == (1, 100)
        assert network.service.state.members == {0, 1}


class TestRequests:
    def test_an_id_that_is_in_use_and_too_many_requests_are_refused(self) -> None:
        network = running()
        network.service = ControlService((0,), TIMING, max_requests=1)
        network.service.connect("rank 0")
        network.ranks = [RankService(0, 1, TIMING)]
        network.start()
        assert network.ask("a", K.SUBMIT, request="u") is Code.ACCEPTED
        assert network.ask("a", K.SUBMIT, request="u") is Code.BAD_COMMAND
        assert last_answer(network, "a").detail == "request u has not ended"
        assert network.ask("a", K.SUBMIT, request="v") is Code.TOO_MANY

    def test_an_abort_reaches_the_replica_and_an_unknown_one_is_not_found(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        assert network.ask("a", K.ABORT, request="u") is Code.OK
        assert network.requests[0] == ["start u", "abort u"]
        assert network.ask("a", K.ABORT, request="v") is Code.NOT_FOUND

    def test_what_has_not_ended_when_the_engine_has_stopped_is_aborted(self) -> None:
        network = running()
        network.ask("a", K.SUBMIT, request="u")
        assert network.ask("b", K.STOP, Mode.NOW) is Code.OK
        assert network.ends_of("a") == [("u", "aborted")]

    @pytest.mark.parametrize(("asked_ms", "seconds"), [(0, 10.0), (2000, 2.0)])
    def test_a_time_out_comes_when_the_time_is_over(self, asked_ms: int, seconds: float) -> None:
        network = running()
        network.busy = {1}
        network.ask("a", K.PAUSE, remaining_ms=asked_ms)
        network.pass_time(seconds - 0.2)
        assert network.service.state.shown == "pausing"
        network.pass_time(0.4)
        assert network.service.state.shown == "running"
        answer = last_answer(network, "a")
        assert (answer.code, answer.detail) == (Code.TIMEOUT, "rank 1: silent")
