"""Requests of a server with two replicas go to both, and outlive the one that is lost."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megatron.control.client import new_id
from megatron.control.rank_thread import ControlThread
from megatron.scheduling.control.member import PrepareDone
from megatron.scheduling.control.messages import Command
from megatron.scheduling.control.rank_service import RankOutput, RankService
from megatron.scheduling.control.service import ControlService
from megatron.scheduling.control.states import Code, CommandKind
from megatron.scheduling.control.timing import ControlTiming
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine_client import (
    EngineQueueFullError,
    EngineUnavailableError,
    RequestRefusedError,
)
from megatron.serving.ranks import routed_engine
from megatron.serving.ranks.control import engine_load, take_tasks
from megatron.serving.ranks.replica_requests import ReplicaRequests
from megatron.serving.ranks.routed_engine import RoutedEngine
from megatron.serving.ranks.votes import Votes
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import LIMITS, CountingExecutor, Listener, request

SECRET = b"of the test"
MS = 1_000_000
# A heartbeat that is longer than the ticks of a thread; a lease that a busy machine keeps.
TIMING = ControlTiming(heartbeat_ns=300 * MS, fence_ns=800 * MS, lease_ns=1500 * MS)


class Replica:
    """An engine of one rank with its member."""

    def __init__(self, rank: int) -> None:
        self.executor = CountingExecutor()
        self.engine = EngineThread(self.executor, LIMITS)
        votes = Votes(self.report)
        service = RankService(rank, 1, TIMING)
        self.control = ControlThread(
            service, SECRET, self.take, load=lambda: engine_load(self.engine)
        )
        self.votes = votes
        self.requests = ReplicaRequests(self.engine, self.control.send_message)
        self.engine.start(votes.done)

    def report(self, done: PrepareDone) -> None:
        self.control.take(done)

    def take(self, output: RankOutput) -> None:
        take_tasks(output.tasks, self.engine, self.votes)
        for each in output.requests:
            self.requests.take(each)


class Served:
    """Two replicas, and the engine that the server has of them."""

    def __init__(self) -> None:
        self.replicas = [Replica(0), Replica(1)]
        first = self.replicas[0].control
        port = first.coordinate(ControlService((0, 1), TIMING))
        self.routed = RoutedEngine(self.replicas[0].engine, first)
        for each in self.replicas:
            each.control.join(port)

    def submit(self, name: str, **changes: Any) -> Listener:
        listener = Listener()
        values = {"max_new_tokens": 20, "stop_tokens": frozenset()} | changes
        self.routed.submit(request(name, **values), listener)
        return listener

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.005)


def served(work: Callable[[Served], Awaitable[None]]) -> None:
    """Do something with two replicas that have started."""
    one = Served()

    async def use() -> None:
        await one.until(lambda: one.routed.status().takes_requests)
        # Members acknowledge that they have started just before their engines take requests.
        await one.until(lambda: all(each.engine.status().takes_requests for each in one.replicas))
        await work(one)

    try:
        run(use())
    finally:
        for each in reversed(one.replicas):
            each.control.close()
            each.executor.before_step = lambda: None
            each.engine.stop()


def test_requests_are_shared_out_and_every_one_has_its_own_tokens() -> None:
    async def share(one: Served) -> None:
        free = threading.Event()  # nothing ends before all are routed
        for each in one.replicas:
            each.executor.before_step = lambda: free.wait(HANG_S) and None
        listeners = [one.submit(f"r{n}", prompt=(n,), max_new_tokens=3) for n in range(6)]
        router = one.replicas[0].control.coordinator.router
        await one.until(lambda: len(router) == 6)
        free.set()
        for n, listener in enumerate(listeners):
            await listener.ended.wait()
            assert listener.end == ("completed", "")
            assert listener.tokens == [n + 1, n + 2, n + 3]
        assert all(each.executor.steps for each in one.replicas)
        status = one.routed.status()
        assert (status.generated_tokens, status.prompt_tokens) == (18, 6)
        assert (status.blocks, status.live_replicas, status.lost_replicas) == (32, (0, 1), ())

    served(share)


def test_a_request_of_a_lost_replica_moves_unless_a_part_of_it_was_sent() -> None:
    async def lose(one: Served) -> None:
        go_on, free = threading.Event(), threading.Event()
        first, other = one.replicas
        router = first.control.coordinator.router

        def hold() -> None:  # after the first token of its first request
            if other.executor.steps:
                go_on.wait(HANG_S)

        # Nothing ends before all are routed: they go to both replicas in turn.
        first.executor.before_step = lambda: free.wait(HANG_S) and None
        other.executor.before_step = hold
        before = one.submit("r0", prompt=(0,), max_new_tokens=1)
        began = one.submit("r1", prompt=(1,))
        await one.until(lambda: bool(began.tokens))
        second = one.submit("r2", prompt=(2,), max_new_tokens=1)
        unsent = one.submit("r3", prompt=(4,), max_new_tokens=2)
        await one.until(lambda: router.replica_of("r3") == 1)
        free.set()
        other.control.leave()
        await began.ended.wait()
        assert began.end == ("failed", "engine_lost: replica 1 is gone")
        for listener in (before, second, unsent):
            await listener.ended.wait()
            assert listener.end == ("completed", "")
        assert unsent.tokens == [5, 6]
        status = one.routed.status()
        assert (status.live_replicas, status.lost_replicas) == ((0,), (1,))
        assert (status.is_alive, status.detail) == (True, "lost replicas: 1")
        paused = Command(new_id(), CommandKind.PAUSE)
        answer = one.replicas[0].control.send(paused, wait_s=HANG_S)
        assert (await asyncio.wrap_future(answer)).code is Code.OK
        with pytest.raises(EngineUnavailableError) as caught:
            one.submit("r5")
        assert caught.value.found == "paused"
        go_on.set()

    served(lose)


def test_without_a_replica_the_engine_has_failed_and_requests_end() -> None:
    async def lose(one: Served) -> None:
        go_on = threading.Event()
        for each in one.replicas:
            each.executor.before_step = lambda: go_on.wait(HANG_S) and None
        listeners = [one.submit("r0"), one.submit("r1")]
        for each in one.replicas:
            each.control.leave()
        for listener in listeners:
            await listener.ended.wait()
            assert listener.end[0] == "failed"
        await one.until(lambda: not one.routed.status().is_alive)
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            one.submit("r2")
        go_on.set()

    served(lose)


def test_requests_are_refused_aborted_and_ended_as_with_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(one: Served) -> None:
        with pytest.raises(RequestRefusedError, match="longer than the model"):
            one.submit("r0", max_new_tokens=99)
        go_on, reached = threading.Event(), []

        def hold() -> None:
            reached.append(None)
            go_on.wait(HANG_S)

        for each in one.replicas:
            each.executor.before_step = hold
        ended, aborted = one.submit("r1", max_new_tokens=25), one.submit("r2", max_new_tokens=25)
        monkeypatch.setattr(EngineThread, "most_requests", 1)
        with pytest.raises(EngineQueueFullError, match="queues of all replicas are full"):
            one.submit("r3")
        await one.until(lambda: len(reached) == 2)
        one.routed.abort("r2")
        one.routed.end_sample("r1", 0)
        one.routed.abort("nobody")
        await one.until(lambda: not any(each.engine._commands.empty() for each in one.replicas))
        go_on.set()
        await ended.ended.wait()
        await aborted.ended.wait()
        assert (ended.end[0], aborted.end[0]) == ("completed", "aborted")
        assert len(ended.tokens) < 25
        monkeypatch.setattr(routed_engine, "MAX_PAYLOAD", 10)
        with pytest.raises(RequestRefusedError, match="too long to be sent"):
            one.submit("r4")

    served(use)
