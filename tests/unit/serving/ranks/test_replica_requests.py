"""A replica answers every request that it is given, also those that it cannot serve."""

import asyncio
import queue
import threading

import pytest

from megatron.scheduling.control.member import PrepareDone
from megatron.scheduling.control.messages import (
    RequestAbort,
    RequestDone,
    RequestProgress,
    RequestStart,
    ToCoordinator,
    encode_message,
)
from megatron.scheduling.control.rank_service import RankOutput
from megatron.scheduling.control.states import CommandKind
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine_client import EngineRequest, PromptComputed, TokenDrawn
from megatron.serving.ranks import replica_requests
from megatron.serving.ranks.payloads import decode_event, encode_request
from megatron.serving.ranks.replica_requests import ReplicaRequests
from tests.support.deadlines import HANG_S
from tests.support.inference.service_network import ServiceNetwork
from tests.support.serving.calls import run
from tests.support.serving.fake_engine import FULL, PAUSED, REFUSED, FakeEngine
from tests.unit.serving.engine.test_engine_thread import LIMITS, CountingExecutor

REQUEST = EngineRequest(id="u", prompt=(1,), max_new_tokens=3)
START = RequestStart(1, 2, 5, "u", encode_request(REQUEST))


def sent_by(engine: FakeEngine, *messages: RequestStart | RequestAbort) -> list[ToCoordinator]:
    """What a replica sends until the engine has nothing more to do."""
    sent: list[ToCoordinator] = []

    async def take() -> None:
        requests = ReplicaRequests(engine, sent.append)
        for message in messages:
            requests.take(message)
        while engine.running:
            await asyncio.sleep(0.002)

    run(take())
    return sent


def test_tokens_and_the_end_are_sent_in_their_order() -> None:
    prompt, *progress, end = sent_by(FakeEngine("abc"), START)
    assert end == RequestDone(2, 5, "u", "completed")
    assert isinstance(prompt, RequestProgress)
    assert decode_event(prompt.payload) == PromptComputed()
    tokens = []
    for message in progress:
        assert isinstance(message, RequestProgress)
        event = decode_event(message.payload)
        assert isinstance(event, TokenDrawn)
        tokens.append(event.token)
    assert bytes(tokens) == b"abc"


def test_a_request_that_cannot_begin_fails_with_the_reason() -> None:
    engine = FakeEngine()
    for error, state, detail in (
        (REFUSED, "failed", "it can never fit"),
        (PAUSED, "aborted", "the engine is paused"),
        (FULL, "aborted", "the queue is full"),
    ):
        engine.error = error
        assert sent_by(engine, START) == [RequestDone(2, 5, "u", state, detail)]
    (end,) = sent_by(FakeEngine(), RequestStart(1, 2, 5, "u", "no request"))
    assert isinstance(end, RequestDone)
    assert end.status == "failed"


def test_a_request_is_ended_whole_or_one_sample_of_it() -> None:
    engine = FakeEngine()
    sent_by(engine, START, RequestAbort(1, 2, 5, "u", sample=1), RequestAbort(1, 2, 5, "u"))
    assert engine.ended_samples == [("u", 1)]
    assert engine.aborted == ["u"]


def test_a_request_whose_scores_are_too_long_fails_and_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_requests, "MAX_PAYLOAD", 10)
    engine = FakeEngine()
    first, *_ = sent_by(engine, START)
    assert first == RequestDone(2, 5, "u", "failed", "its scores are too long to be sent")
    assert engine.aborted == ["u"]


class HeldReplica:
    """A replica on a simulated network whose engine prepares, and stands still until it may go on.

    The coordinator hears of what is prepared when `acknowledge` is called.
    """

    def __init__(self) -> None:
        self.network, self.may_go_on = ServiceNetwork((0,)), threading.Event()
        self.engine = EngineThread(CountingExecutor(), LIMITS)
        self.prepared: queue.SimpleQueue[PrepareDone] = queue.SimpleQueue()
        self.requests = ReplicaRequests(
            self.engine, lambda message: self.network.send("rank 0", encode_message(message))
        )
        self.network.engines[0] = self.take

    def take(self, output: RankOutput) -> None:
        for task in output.tasks:
            self.engine.take_task(task)
        for request in output.requests:
            self.requests.take(request)

    def report(self, done: PrepareDone) -> None:  # in the thread of the engine
        self.prepared.put(done)
        assert self.may_go_on.wait(HANG_S)

    async def acknowledge(self) -> None:
        done = await asyncio.to_thread(self.prepared.get, True, HANG_S)
        self.network.from_rank(0, self.network.ranks[0].take(done))

    def submit(self, name: str) -> None:
        payload = encode_request(EngineRequest(id=name, prompt=(1,), max_new_tokens=3))
        self.network.ask("client", CommandKind.SUBMIT, request=name, payload=payload)

    async def ends(self, count: int) -> list[tuple[str, str]]:
        async with asyncio.timeout(HANG_S):
            while len(found := self.network.ends_of("client")) < count:
                await asyncio.sleep(0.002)
        return found


def test_a_request_that_comes_between_an_acknowledged_start_and_the_start_is_served_once() -> None:
    replica = HeldReplica()

    async def use() -> None:
        network = replica.network
        replica.engine.start(replica.report)
        network.pass_time(2.0)
        await replica.acknowledge()
        assert network.service.state.shown == "running"
        assert replica.engine.status().state == "loading", "the engine has not come to it"
        replica.submit("first")
        assert network.ends_of("client") == []
        replica.may_go_on.set()
        assert await replica.ends(1) == [("first", "completed")]
        # Likewise between the end of a pause that is called off, and the engine's own.
        replica.may_go_on.clear()
        network.ask("client", CommandKind.PAUSE)
        await asyncio.to_thread(replica.prepared.get, True, HANG_S)
        network.ask("client", CommandKind.RESUME, cancel=True)
        assert network.service.state.shown == "running"
        assert not replica.engine.status().takes_requests
        replica.submit("second")
        replica.may_go_on.set()
        assert await replica.ends(2) == [("first", "completed"), ("second", "completed")]

    run(use())
    assert replica.engine.stop()
