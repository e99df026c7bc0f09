"""A rank that follows computes the leader's steps, and stops where the two would differ."""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.replay import LeadingScheduler, ReplayError
from megatron.scheduling.requests import Request
from megatron.scheduling.scheduler import Scheduler
from megatron.serving.engine import engine_thread
from megatron.serving.engine.engine_thread import EngineThread, queue_limits
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.round_log import EngineEnd, EngineStep, RankMessage
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import LIMITS, CountingExecutor, Listener, request


class QueueLog:
    """A log between threads; it keeps what was sent."""

    has_followers = True

    def __init__(self) -> None:
        self.sent: list[RankMessage] = []
        self._messages: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()

    def send(self, message: RankMessage) -> None:
        self.sent.append(message)
        self._messages.put(message)

    def receive(self) -> RankMessage:
        return self._messages.get(timeout=HANG_S)


class CountingFollower:
    """Notes the steps that it is to compute."""

    def __init__(self) -> None:
        self.steps: list[ForwardPlan] = []
        self.before_step: Callable[[], None] = lambda: None

    def follow(self, plan: ForwardPlan) -> None:
        self.before_step()
        self.steps.append(plan)


def follower_of(log: QueueLog, computed: CountingFollower) -> Follower:
    return Follower(computed, queue_limits(LIMITS), receive=log.receive)


def submitted(log: QueueLog, executor: CountingExecutor, *names: str) -> list[Listener]:
    """Let an engine with a log serve requests, and stop it."""

    async def serve() -> list[Listener]:
        engine = EngineThread(executor, LIMITS, ranks=log)
        engine.start()
        listeners = [Listener() for _ in names]
        for name, listener in zip(names, listeners):
            scored = 0 if name == "scored" else None
            engine.submit(request(name, prompt_logprobs=scored), listener)
            await listener.ended.wait()
        engine.stop()
        return listeners

    found: list[Listener] = run(serve())
    return found


def test_a_follower_computes_every_step_of_the_leader_and_stops_with_it() -> None:
    log, executor, computed = QueueLog(), CountingExecutor(), CountingFollower()
    follower = follower_of(log, computed)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(follower.run()), daemon=True)
    thread.start()
    listeners = submitted(log, executor, "a", "scored", "b")
    thread.join(HANG_S)
    assert [listener.end[0] for listener in listeners] == ["completed"] * 3
    assert ended == ["the engine was stopped"]
    assert computed.steps == executor.steps


def test_scores_that_are_not_finite_end_their_request_and_no_follower() -> None:
    log, executor, computed = QueueLog(), CountingExecutor(), CountingFollower()

    def only_the_first_step_is_wrong() -> None:
        executor.bad_token = None if executor.steps else 2

    executor.before_step = only_the_first_step_is_wrong
    first, second = submitted(log, executor, "a", "b")
    assert (first.end[0], second.end[0]) == ("failed", "completed")
    assert follower_of(log, computed).run() == "the engine was stopped"
    assert computed.steps == executor.steps


def test_an_error_that_the_other_ranks_may_not_find_ends_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, executor = QueueLog(), CountingExecutor()

    def fail() -> None:
        raise RuntimeError("connection closed by peer")

    executor.before_step = fail

    async def use() -> str:
        engine = EngineThread(executor, LIMITS, ranks=log)
        engine.start()
        listener = Listener()
        engine.submit(request(), listener)
        await listener.ended.wait()
        engine._thread.join(HANG_S)
        assert listener.end == ("failed", engine.status().detail)
        return engine.status().detail

    together = "the ranks of the engine can no longer compute together"
    assert run(use()) == f"{together}: connection closed by peer"
    assert not any(isinstance(each, EngineEnd) for each in log.sent)
    assert "a step of the engine failed" in capsys.readouterr().err


def leading_steps(count: int) -> list[EngineStep]:
    leading = LeadingScheduler(Scheduler(queue_limits(LIMITS)))
    leading.submit(Request(id="a", prompt=(1, 2), max_new_tokens=9, arrival_ns=0))
    steps = []
    for now_ns in range(count):
        plan, record = leading.plan(now_ns)
        steps.append(EngineStep(record))
        leading.complete({each.sequence: (1,) for each in plan.slices})
    return steps


def followed(messages: list[RankMessage], computed: CountingFollower) -> None:
    log = QueueLog()
    for message in messages:
        log.send(message)
    follower_of(log, computed).run()


def test_a_follower_stops_where_its_plan_or_the_round_differs() -> None:
    one, two = leading_steps(2)
    with pytest.raises(ReplayError, match="plan different steps from the same commands"):
        followed([EngineStep(replace(one.record, digest=b"other"))], CountingFollower())
    computed = CountingFollower()
    with pytest.raises(ReplayError, match="is missing, or came twice"):
        followed([two], computed)
    assert not computed.steps


def test_an_error_of_this_rank_alone_ends_it_at_once() -> None:
    computed = CountingFollower()

    def fail() -> None:
        raise RuntimeError("no memory")

    computed.before_step = fail
    with pytest.raises(RuntimeError, match="no memory"):
        followed([*leading_steps(1)], computed)


def test_an_idle_engine_sends_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "_IDLE_S", 0.01)
    log = QueueLog()
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += 4_000_000_000  # each look is four seconds later
        return now_ns

    async def use() -> None:
        engine = EngineThread(CountingExecutor(), LIMITS, ranks=log, clock_ns=clock)
        engine.start()
        while len(log.sent) < 2:
            await asyncio.sleep(0.01)
        assert engine.stop()

    run(use())
    records = [each.record for each in log.sent if isinstance(each, EngineStep)]
    assert [record.round for record in records] == list(range(1, len(records) + 1))
