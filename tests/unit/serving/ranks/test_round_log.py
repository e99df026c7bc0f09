"""Messages of an engine's log, and which errors its ranks find alike."""

import pickle
from dataclasses import replace

import pytest

from megatron.errors import ConfigError, MachineError, NumericsError
from megatron.mpu.context import Group, ParallelContext
from megatron.scheduling.replay import RoundRecord, StepResult
from megatron.serving.ranks.round_log import (
    EngineEnd,
    EngineStep,
    GroupLog,
    LocalLog,
    check_idle_wait,
    engine_group,
    is_found_alike,
)


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
    assert engine_group(replace(alone, pp=both, model=both, tp_cp=one)) is both


def test_messages_travel_as_they_are() -> None:
    record = RoundRecord(3, 7, (StepResult({1: (2,)}, (1,)),), b"digest")
    for message in (EngineStep(record), EngineEnd("end")):
        assert pickle.loads(pickle.dumps(message)) == message


def test_scores_that_are_not_finite_are_found_by_all_ranks_and_nothing_else_is() -> None:
    assert is_found_alike(NumericsError("not finite", fix="check the weights"))
    assert not is_found_alike(MachineError("no memory", fix="use less"))
    assert not is_found_alike(RuntimeError("connection closed by peer"))


def test_ranks_wait_longer_than_an_idle_engine_is_silent() -> None:
    check_idle_wait(0.5)
    with pytest.raises(ConfigError, match="idle engine would give up waiting") as caught:
        check_idle_wait(0.1)
    assert caught.value.fix == "use --distributed-timeout-minutes 0.5 or more"
