"""An engine in its thread pauses, suspends and stops between two steps, and goes on as before."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from torch import nn

from megatron.errors import CheckpointError
from megatron.scheduling.control.member import EngineTask, PrepareDone, TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import EDGES, Mode, ServingState, TransitionKind
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.replay import CacheDrop
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine_client import EngineUnavailableError
from megatron.serving.ranks.engine_transitions import QueuedTransitions
from megatron.serving.ranks.rank_model import RankModel
from megatron.serving.ranks.round_log import EngineEnd, EngineStep, RankTransition
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import LIMITS, CountingExecutor, Listener, request
from tests.unit.serving.ranks.test_follower import QueueLog

K = TransitionKind


class NoCache:
    """A cache whose memory nobody looks at."""

    def saved(self, blocks: object) -> Any:
        return None

    def release(self) -> None: ...

    def restore(self, blocks: object = (), saved: object = None) -> None: ...


class Controlled:
    """An engine and the tasks of its member."""

    def __init__(
        self,
        load: Callable[[str], nn.Module] | None = None,
        *,
        executor: CountingExecutor | None = None,
        log: QueueLog | None = None,
        limits: SchedulerLimits = LIMITS,
    ) -> None:
        self.log, self.executor = log or QueueLog(), executor or CountingExecutor()
        model = RankModel(nn.Linear(1, 1), NoCache(), load=load)
        self.engine = EngineThread(self.executor, limits, ranks=self.log, model=model)
        self.state, self.epoch = ServingState.LOADING, 0
        self.reported: dict[int, PrepareDone] = {}

    def report(self, done: PrepareDone) -> None:
        self.reported[done.epoch] = done

    def task(self, part: TaskKind, prepare: Prepare) -> None:
        self.engine.take_task(EngineTask(part, prepare))

    def begin(self, kind: TransitionKind, mode: Mode | None = None) -> Prepare:
        """Ask the engine to prepare a transition."""
        self.epoch += 1
        edge = EDGES[kind]
        target = edge.target_from(self.state)
        chosen = edge.modes[0] if mode is None else mode
        prepare = Prepare(1, 0, 1, self.epoch, kind, target, chosen, 7, 0, "folder")
        self.task(TaskKind.PREPARE, prepare)
        return prepare

    async def prepared(self, prepare: Prepare) -> PrepareDone:
        while prepare.epoch not in self.reported:
            await asyncio.sleep(0.002)
        return self.reported[prepare.epoch]

    async def make(self, kind: TransitionKind, mode: Mode | None = None) -> None:
        """Make a transition, and wait until the engine shows its state."""
        prepare = self.begin(kind, mode)
        assert (await self.prepared(prepare)).code == ""
        self.task(TaskKind.APPLY, prepare)
        self.state = prepare.target
        await self.shown(self.state)
        while self.engine.settled_epoch < prepare.epoch:
            await asyncio.sleep(0.002)

    async def shown(self, state: str) -> None:
        while self.engine.status().state != state:
            await asyncio.sleep(0.002)

    def submit(self, name: str = "a", **changes: Any) -> Listener:
        listener = Listener()
        values = {"max_new_tokens": 20, "stop_tokens": frozenset()} | changes
        self.engine.submit(request(name, **values), listener)
        return listener

    @property
    def transitions(self) -> list[tuple[str, str]]:
        """Parts of transitions that all ranks made."""
        return [
            (str(each.part), str(each.prepare.transition))
            for each in self.log.sent
            if isinstance(each, RankTransition)
        ]


def controlled(
    work: Callable[[Controlled], Awaitable[None]], load: Callable[[str], nn.Module] | None = None
) -> Controlled:
    """Do something with an engine that has started, and end it."""
    one = Controlled(load)

    async def use() -> None:
        one.engine.start(one.report)
        assert one.engine.status().state == "loading"
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            one.submit()
        await one.make(K.START)
        await work(one)

    run(use())
    one.engine.stop()
    return one


def test_a_frozen_request_waits_and_goes_on_with_the_same_tokens() -> None:
    async def freeze(one: Controlled) -> None:
        reached, go_on = threading.Event(), threading.Event()

        def hold_third() -> None:
            if len(one.executor.steps) == 2:
                reached.set()
                go_on.wait(HANG_S)

        one.executor.before_step = hold_third
        listener = one.submit()
        await asyncio.to_thread(reached.wait, HANG_S)
        prepare = one.begin(K.PAUSE)
        go_on.set()
        await one.prepared(prepare)
        one.task(TaskKind.APPLY, prepare)
        await one.shown("paused")
        steps = len(one.executor.steps)
        assert steps == 3
        with pytest.raises(EngineUnavailableError, match="takes no requests") as caught:
            one.submit("b")
        assert caught.value.found == "paused"
        await asyncio.sleep(0.02)
        assert len(one.executor.steps) == steps
        await one.make(K.RESUME)
        await listener.ended.wait()
        assert listener.end == ("completed", "")
        assert listener.tokens == list(range(3, 23))

    controlled(freeze)


def test_a_drain_waits_for_requests_and_takes_no_others() -> None:
    async def drain(one: Controlled) -> None:
        go_on = threading.Event()
        one.executor.before_step = lambda: go_on.wait(HANG_S) and None
        listener = one.submit()
        prepare = one.begin(K.PAUSE, Mode.DRAIN)
        go_on.set()
        await one.prepared(prepare)
        assert listener.ended.is_set() or one.engine._unfinished == 0
        await listener.ended.wait()
        assert listener.end[0] == "completed"
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            one.submit("b")

    controlled(drain)


def test_a_pause_that_aborts_ends_requests_only_when_it_is_decided() -> None:
    async def abort(one: Controlled) -> None:
        one.executor.before_step = lambda: threading.Event().wait(0.005) and None
        listener = one.submit()
        prepare = one.begin(K.PAUSE, Mode.ABORT)
        await one.prepared(prepare)
        assert not listener.ended.is_set()
        one.task(TaskKind.UNDO, prepare)
        await one.shown("running")
        await listener.ended.wait()
        assert listener.end[0] == "completed"
        second = one.submit("b")
        await one.make(K.PAUSE, Mode.ABORT)
        await second.ended.wait()
        assert second.end == ("aborted", "the engine was paused")

    controlled(abort)


def test_a_dropped_cache_is_computed_again_with_the_same_tokens() -> None:
    async def drop(one: Controlled) -> None:
        one.executor.before_step = lambda: threading.Event().wait(0.002) and None
        listener = one.submit()
        await one.make(K.PAUSE)
        await one.make(K.SUSPEND, Mode.DROP)
        assert one.engine.status().used_blocks == 0
        await one.make(K.RESUME)
        await listener.ended.wait()
        assert listener.tokens == list(range(3, 23))

    one = controlled(drop)
    drops = [
        command
        for each in one.log.sent
        if isinstance(each, EngineStep)
        for command in each.record.commands
        if isinstance(command, CacheDrop)
    ]
    assert drops == [CacheDrop(None)]


def test_new_weights_empty_the_cache_with_their_version() -> None:
    async def exchange(one: Controlled) -> None:
        await one.make(K.PAUSE)
        await one.make(K.NEW_WEIGHTS)
        await one.make(K.RESUME)
        listener = one.submit()
        await listener.ended.wait()

    one = controlled(exchange, load=lambda folder: nn.Linear(1, 1))
    first = next(each for each in one.log.sent if isinstance(each, EngineStep))
    assert first.record.commands[0] == CacheDrop(7)
    assert one.transitions[4:6] == [("prepare", "new_weights"), ("apply", "new_weights")]


def test_weights_that_a_rank_refuses_are_undone_on_all_and_the_engine_stays_paused() -> None:
    def fail(folder: str) -> nn.Module:
        raise CheckpointError("it is of another model", found=folder, fix="give another")

    async def exchange(one: Controlled) -> None:
        await one.make(K.PAUSE)
        done = await one.prepared(one.begin(K.NEW_WEIGHTS))
        assert (done.code, done.detail) == ("refused", "it is of another model")
        assert one.engine.status().state == "paused"
        assert one.engine.settled_epoch == one.epoch
        await one.make(K.RESUME)

    one = controlled(exchange, load=fail)
    assert one.transitions[4:6] == [("prepare", "new_weights"), ("undo", "new_weights")]


def test_a_pause_that_is_undone_takes_requests_again() -> None:
    async def undo(one: Controlled) -> None:
        prepare = one.begin(K.PAUSE, Mode.DRAIN)
        await one.prepared(prepare)
        one.task(TaskKind.UNDO, prepare)
        await one.shown("running")
        listener = one.submit()
        await listener.ended.wait()
        assert listener.end[0] == "completed"

    controlled(undo)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_stop_ends_all_requests_and_tells_the_other_ranks(is_paused: bool) -> None:
    async def stop(one: Controlled) -> None:
        one.executor.before_step = lambda: threading.Event().wait(0.005) and None
        listener = one.submit()
        if is_paused:
            await one.make(K.PAUSE)
        await one.make(K.STOP, Mode.DRAIN if is_paused else Mode.NOW)
        await listener.ended.wait()
        assert listener.end == ("aborted", "the engine was stopped")
        assert (one.engine.status().is_alive, one.engine.status().detail) == (
            False,
            "it was stopped",
        )

    assert controlled(stop).log.sent[-1] == EngineEnd("the engine was stopped")


def test_an_engine_whose_ranks_are_lost_has_failed_while_its_thread_waits_for_them() -> None:
    async def lose(one: Controlled) -> None:
        go_on = threading.Event()
        one.executor.before_step = lambda: go_on.wait(HANG_S) and None
        one.submit()
        one.engine.take_task(EngineTask(TaskKind.RESET, detail="rank 1 of its replica is lost"))
        status = one.engine.status()
        assert (status.state, status.is_alive) == ("failed", False)
        assert status.detail == "rank 1 of its replica is lost"
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            one.submit("b")
        go_on.set()

    controlled(lose)


def test_a_preparation_may_take_longer_than_a_step() -> None:
    one_s = 1_000_000_000
    now_ns, go_on, reached = [0], threading.Event(), threading.Event()

    def load(folder: str) -> nn.Module:
        reached.set()
        go_on.wait(HANG_S)
        return nn.Linear(1, 1)

    one = Controlled(load)
    one.engine._clock_ns = lambda: now_ns[0]

    async def exchange() -> None:
        one.engine.start(one.report)
        await one.make(K.START)
        await one.make(K.PAUSE)
        prepare = one.begin(K.NEW_WEIGHTS)
        await asyncio.to_thread(reached.wait, HANG_S)
        now_ns[0] += 100 * one_s  # a step may take 60, and a preparation 60 more
        assert one.engine.status().is_alive
        now_ns[0] += 30 * one_s
        assert not one.engine.status().is_alive
        go_on.set()
        await one.prepared(prepare)

    run(exchange())
    assert one.engine.stop()


def test_requests_may_follow_the_task_of_a_start_and_not_that_of_a_pause() -> None:
    queued, taken = QueuedTransitions(), []
    begins = [(K.START, ServingState.RUNNING), (K.PAUSE, ServingState.PAUSED)]
    for epoch, (kind, target) in enumerate(begins, start=1):
        prepare = Prepare(1, 0, 1, epoch, kind, target, Mode.DEFAULT, 0, 0)
        for part in (TaskKind.PREPARE, TaskKind.UNDO, TaskKind.PREPARE, TaskKind.APPLY):
            queued.add(EngineTask(part, prepare))
            taken.append(queued.takes_requests)
    assert taken == [False, False, False, True, False, True, False, False]
    queued.add(EngineTask(TaskKind.RESET))
    assert not queued.takes_requests
