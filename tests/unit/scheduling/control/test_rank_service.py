"""Tests of megatron.scheduling.control.rank_service."""

import pytest

from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import (
    Answer,
    Dismissed,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Prepare,
    RequestAbort,
    RequestStart,
    Welcome,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.rank_service import EngineLoad, RankService
from megatron.scheduling.control.states import Code, Mode, ServingState, TransitionKind
from megatron.scheduling.control.timing import ControlTiming

TIMING = ControlTiming(heartbeat_ns=10, fence_ns=30, lease_ns=50)


def sent(data: tuple[bytes, ...]) -> list[Message]:
    return [decode_message(one) for one in data]


def joined() -> RankService:
    """Return a rank that is running, and has heard the coordinator at 0."""
    rank = RankService(0, 1, TIMING)
    rank.receive(encode_message(Welcome(1, 0, 1, ServingState.RUNNING, 4, 0)), 0)
    rank.receive(encode_message(Lease(1, 0, 1)), 0)
    assert rank.state.admits
    return rank


def test_a_rank_says_hello_until_it_is_heard_and_then_sends_heartbeats() -> None:
    rank = RankService(0, 1, TIMING)
    assert sent(rank.tick(0).data) == [Hello(0, 1)]
    assert rank.tick(9).data == ()
    assert sent(rank.tick(10).data) == [Hello(0, 1)]
    (beat,) = sent(joined().tick(0, EngineLoad(1, 2, 3)).data)
    assert beat == Heartbeat(0, 1, ServingState.RUNNING, 4, 1, 2, 3)


def test_a_rank_that_hears_nothing_admits_nothing_until_it_does() -> None:
    rank = joined()
    rank.tick(30)
    assert rank.state.admits
    rank.tick(31)
    assert not rank.state.admits
    rank.receive(encode_message(Lease(1, 0, 1)), 32)
    assert rank.state.admits
    rank.tick(62)
    assert rank.state.admits


def test_a_fenced_rank_says_hello_beside_its_heartbeat() -> None:
    rank = joined()
    assert [type(one).__name__ for one in sent(rank.tick(31).data)] == ["Hello", "Heartbeat"]


def test_tasks_and_requests_are_handed_to_the_engine() -> None:
    rank = joined()
    for message in (RequestStart(1, 0, 1, "u"), RequestAbort(1, 0, 1, "u")):
        assert rank.receive(encode_message(message), 0).requests == (message,)
    assert rank.receive(encode_message(RequestStart(1, 0, 0, "u")), 0).requests == ()
    pause = Prepare(1, 0, 1, 5, TransitionKind.PAUSE, ServingState.PAUSED, Mode.FREEZE, 0, 0)
    (task,) = rank.receive(encode_message(pause), 0).tasks
    assert (task.kind, task.prepare) == (TaskKind.PREPARE, pause)
    (acknowledged,) = sent(rank.take(PrepareDone(5)).data)
    assert type(acknowledged).__name__ == "Ack"


def test_a_rank_that_is_dismissed_ends_its_requests_and_joins_again() -> None:
    rank = joined()
    rank.tick(0)
    output = rank.receive(encode_message(Dismissed(1, 0, 1, "lost")), 5)
    assert [task.kind for task in output.tasks] == [TaskKind.RESET]
    assert sent(rank.tick(10).data) == [Hello(0, 2)]


@pytest.mark.parametrize("data", [b"", b"{}", encode_message(Hello(0, 1))])
def test_what_is_no_message_for_a_rank_is_counted_and_changes_nothing(data: bytes) -> None:
    rank = joined()
    before = rank.state
    assert rank.receive(data, 5) == ((), (), ())
    assert (rank.state, rank.refused) == (before, 1)


def test_what_the_coordinator_refused_is_no_message_for_the_engine() -> None:
    rank = joined()
    refusal = Answer("", Code.BAD_COMMAND, "running", 1, "this is not incarnation 1 of rank 0")
    assert rank.receive(encode_message(refusal), 5) == ((), (), ())
    assert rank.refused == 0
