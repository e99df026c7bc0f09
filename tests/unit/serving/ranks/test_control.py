"""An engine starts, pauses and stops by way of a coordinator and sockets, as operators ask."""

import asyncio

import pytest

from megatron.control.client import new_id
from megatron.errors import MachineError
from megatron.mpu.context import ParallelContext
from megatron.scheduling.control.member import EngineTask, PrepareDone, TaskKind
from megatron.scheduling.control.messages import Answer, Command, Prepare
from megatron.scheduling.control.states import (
    Code,
    CommandKind,
    Mode,
    ServingState,
    TransitionKind,
)
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.ranks import control as control_module
from megatron.serving.ranks.control import (
    engine_load,
    replica_numbers,
    run_replica,
    start_control,
    take_tasks,
    wait_until_running,
)
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.votes import Votes
from megatron.serving.server import EngineLostError
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import LIMITS, CountingExecutor, Listener, request
from tests.unit.serving.ranks.test_follower import CountingFollower, QueueLog, follower_of

ALONE = ParallelContext.single()


def test_an_engine_starts_pauses_goes_on_and_stops_as_it_is_asked() -> None:
    engine = EngineThread(CountingExecutor(), LIMITS)
    control = start_control(engine, ALONE)
    wait_until_running(engine)

    def asked(kind: CommandKind, mode: Mode = Mode.DEFAULT) -> Answer:
        return control.send(Command(new_id(), kind, mode), wait_s=HANG_S).result(HANG_S)

    async def complete() -> tuple[str, str]:
        listener = Listener()
        engine.submit(request(), listener)
        await listener.ended.wait()
        return listener.end

    assert run(complete()) == ("completed", "")
    paused = asked(CommandKind.PAUSE)
    assert (paused.code, paused.state, paused.ranks[0].verdict) == (Code.OK, "paused", "ack")
    assert asked(CommandKind.NEW_WEIGHTS).code is Code.BAD_COMMAND
    command = Command(new_id(), CommandKind.NEW_WEIGHTS, weights=1, source="folder")
    assert control.weights == 0
    assert control.send(command, wait_s=HANG_S).result(HANG_S).code is Code.OK
    assert control.weights == 1
    assert asked(CommandKind.RESUME).state == "running"
    assert asked(CommandKind.SUSPEND).code is Code.WRONG_STATE
    assert run(complete()) == ("completed", "")
    assert asked(CommandKind.STOP).state == "stopped"
    control.close()
    assert engine.stop()


def test_ranks_that_do_not_start_are_named_in_time() -> None:
    engine = EngineThread(CountingExecutor(), LIMITS)
    with pytest.raises(MachineError, match="have not started together") as caught:
        wait_until_running(engine, within_s=0.05)
    assert caught.value.found == "loading after 0.05 s"


def test_a_follower_says_what_became_of_what_its_leader_did_and_does_nothing_by_itself() -> None:
    reported: list[PrepareDone] = []
    votes, log = Votes(reported.append), QueueLog()
    follower: Follower = follower_of(log, CountingFollower())
    prepare = Prepare(1, 1, 1, 3, TransitionKind.PAUSE, ServingState.PAUSED, Mode.FREEZE, 0, 0)
    take_tasks([EngineTask(TaskKind.PREPARE, prepare)], follower, votes)
    take_tasks([EngineTask(TaskKind.APPLY, prepare)], follower, votes)
    assert reported == []
    votes.done(PrepareDone(3))
    assert reported == [PrepareDone(3)]


def test_ranks_of_one_engine_are_one_replica() -> None:
    assert replica_numbers([0, 0, 2, 2]) == (0, 0, 1, 1)
    assert replica_numbers([0, 1, 0, 1]) == (0, 1, 0, 1)


class Fenced:
    """A control plane that hears nothing."""

    is_fenced = True


def test_a_replica_runs_until_it_is_stopped_and_no_longer_than_it_can_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(control_module, "_ORPHANED_S", 0.05)
    stopped = EngineThread(CountingExecutor(), LIMITS)
    stopped.start()
    assert stopped.stop()
    run_replica(stopped, Fenced())  # type: ignore[arg-type]
    alone = EngineThread(CountingExecutor(), LIMITS)
    alone.start()
    with pytest.raises(EngineLostError, match="the engine of this replica no longer") as caught:
        run_replica(alone, Fenced())  # type: ignore[arg-type]
    assert caught.value.found == "rank 0 was not heard for 0.05 s"
    alone.lose("a rank of it is gone")
    with pytest.raises(EngineLostError) as caught:
        run_replica(alone, Fenced())  # type: ignore[arg-type]
    assert caught.value.found == "a rank of it is gone"
    assert alone.stop()


def test_an_engine_that_fails_says_so_to_the_coordinator() -> None:
    executor = CountingExecutor()

    def fail() -> None:
        raise ValueError("broken")

    executor.before_step = fail
    engine = EngineThread(executor, LIMITS)
    control = start_control(engine, ALONE)
    wait_until_running(engine)

    async def use() -> None:
        for name in "abc":
            listener = Listener()
            engine.submit(request(name), listener)
            await listener.ended.wait()
        while control.coordinator.state.state is not ServingState.FAILED:
            await asyncio.sleep(0.01)

    run(use())
    control.close()


def test_heartbeats_tell_how_much_an_engine_has_to_do() -> None:
    limits = SchedulerLimits(blocks=16, block_size=4, max_length=32, vocab_size=100)
    assert engine_load(EngineThread(CountingExecutor(), limits)) == (0, 0, 16)
