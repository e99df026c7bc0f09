"""Messages of an engine's log, and how they travel."""

import pickle
import threading
from dataclasses import replace

import pytest

from megatron.errors import ConfigError
from megatron.mpu.context import Group, ParallelContext
from megatron.scheduling.replay import RoundRecord, StepResult
from megatron.serving.ranks.round_log import (
    AheadLog,
    EngineEnd,
    EngineStep,
    GroupLog,
    IdleRound,
    LocalLog,
    RankMessage,
    check_idle_wait,
    engine_group,
)

SLOW_S = 2.0  # much longer than what it waits for takes


def test_a_log_of_one_rank_has_no_followers_and_sends_nothing() -> None:
    alone = GroupLog(engine_group(ParallelContext.single()))
    alone.send(EngineEnd("it stops"))
    LocalLog().send(EngineEnd("it stops"))
    assert (alone.leads, alone.has_followers, LocalLog().has_followers) == (True, False, False)
    second = GroupLog(Group((0, 1), 1))
    assert (second.leads, second.has_followers) == (False, True)


def test_the_ranks_of_all_stages_are_one_engine() -> None:
    one, both = Group((0,), 0), Group((0, 2), 0)
    alone = ParallelContext.single()
    assert engine_group(replace(alone, all_weights=both, tp_cp=one)) is both


class SlowLog:
    """Sends a message only when it is told to."""

    has_followers = True

    def __init__(self) -> None:
        self.go_on, self.sent = threading.Semaphore(0), list[RankMessage]()

    def send(self, message: RankMessage) -> None:
        self.go_on.acquire(timeout=SLOW_S)
        if isinstance(message, IdleRound):
            raise RuntimeError("connection closed by peer")
        self.sent.append(message)


def test_a_leader_goes_on_while_a_step_is_sent_and_waits_for_all_else() -> None:
    slow = SlowLog()
    log = AheadLog(slow)
    steps = [EngineStep(RoundRecord(number, 7, (), b"")) for number in range(3)]
    for step in steps:
        log.send(step)
    assert slow.sent == []
    threading.Timer(0.02, lambda: slow.go_on.release(4)).start()
    log.send(EngineEnd("end"))
    assert slow.sent == [*steps, EngineEnd("end")]


def test_a_leader_hears_of_a_message_that_could_not_be_sent() -> None:
    slow = SlowLog()
    log = AheadLog(slow)
    slow.go_on.release(9)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        log.send(IdleRound())
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        log.send(EngineStep(RoundRecord(1, 7, (), b"")))
    assert slow.sent == []


def test_messages_travel_as_they_are() -> None:
    record = RoundRecord(3, 7, (StepResult({1: (2,)}, (1,)),), b"digest")
    for message in (EngineStep(record), EngineEnd("end")):
        assert pickle.loads(pickle.dumps(message)) == message


def test_ranks_wait_longer_than_an_idle_engine_is_silent() -> None:
    check_idle_wait(0.5)
    with pytest.raises(ConfigError, match="idle engine would give up waiting") as caught:
        check_idle_wait(0.1)
    assert caught.value.fix == "use --distributed-timeout-minutes 0.5 or more"
