"""An engine with several steps in flight tells of the same tokens, and drains before all else."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from megatron.inference.forward import SliceResult
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.control.states import Mode, TransitionKind
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.serving.engine.engine_thread import EngineThread, queue_limits
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.round_log import EngineStep, RankMessage
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.unit.serving.engine.test_engine_thread import (
    LIMITS,
    CountingExecutor,
    Listener,
    request,
)
from tests.unit.serving.ranks.test_engine_transitions import Controlled
from tests.unit.serving.ranks.test_follower import CountingFollower, QueueLog

TWO = replace(LIMITS, steps_in_flight=2)
ENDLESS = frozenset[int]()


class StagedExecutor(CountingExecutor):
    """Counts the steps that were begun and have not ended, at the beginning of each."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[ForwardPlan] = []
        self.open = 0
        self.in_flight: list[int] = []
        self.at_begin: Callable[[ForwardPlan], None] = lambda plan: None

    def start(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Callable[[], Sequence[SliceResult]]:
        self.at_begin(plan)
        self.begun.append(plan)
        self.open += 1
        self.in_flight.append(self.open)

        def results() -> Sequence[SliceResult]:
            self.open -= 1
            return self.run(plan, draws)

        return results


class DrainedLog(QueueLog):
    """Counts the steps in flight while a message is sent that is no step."""

    def __init__(self, executor: StagedExecutor) -> None:
        super().__init__()
        self._executor = executor
        self.open: list[int] = []

    def send(self, message: RankMessage) -> None:
        if not isinstance(message, EngineStep):
            self.open.append(self._executor.open)
        super().send(message)


def served(
    executor: StagedExecutor, work: Callable[[EngineThread], None], **changes: object
) -> tuple[Listener, Listener]:
    """Serve two requests; `work` is called where a step begins while one of `b` is in flight.

    Args:
        changes: to the first request.
    """
    engine = EngineThread(executor, TWO)

    def look(plan: ForwardPlan) -> None:
        if executor.open and plan.slices[0].sequence == 0:
            executor.at_begin = lambda plan: None
            work(engine)

    executor.at_begin = look

    async def use() -> tuple[Listener, Listener]:
        one, two = Listener(), Listener()
        engine.start()
        engine.submit(request("a", max_new_tokens=20, stop_tokens=ENDLESS, **changes), one)
        engine.submit(request("b", max_new_tokens=20, stop_tokens=ENDLESS, prompt=(50,)), two)
        await asyncio.gather(one.ended.wait(), two.ended.wait())
        return one, two

    try:
        listeners: tuple[Listener, Listener] = run(use())
    finally:
        assert engine.stop()
    assert engine.status().used_blocks == executor.open == 0
    return listeners


A, B = list(range(3, 23)), list(range(51, 71))


def test_a_step_begins_before_the_one_of_other_requests_has_ended() -> None:
    executor = StagedExecutor()
    one, two = served(executor, lambda engine: None)
    assert (one.tokens, two.tokens) == (A, B)
    assert max(executor.in_flight) == 2
    assert sum(count == 2 for count in executor.in_flight) >= 10
    assert executor.begun == executor.steps, "they end in the order in which they began"


def test_a_request_that_is_aborted_in_flight_gets_no_more_tokens_and_harms_no_other() -> None:
    executor = StagedExecutor()
    one, two = served(executor, lambda engine: engine.abort("a"))
    assert one.end[0] == "aborted"
    assert one.tokens == A[: len(one.tokens)]
    assert len(one.tokens) < len(A)
    assert (two.tokens, two.end) == (B, ("completed", ""))


def test_a_sample_that_is_stopped_in_flight_gets_no_more_tokens() -> None:
    executor = StagedExecutor()
    seen: list[int] = []

    def stop(engine: EngineThread) -> None:
        seen.append(len(engine._requests._samples[0].output))
        engine.end_sample("a", 0)

    one, two = served(executor, stop)
    assert one.end == ("completed", "")
    assert one.tokens == A[: seen[0]]
    assert two.tokens == B


def test_scores_of_an_ended_request_that_are_not_finite_concern_nobody() -> None:
    executor = StagedExecutor()

    def end(engine: EngineThread) -> None:
        executor.bad_token = executor.begun[-2].slices[0].tokens[-1] + 1
        engine.abort("a")

    one, two = served(executor, end)
    assert (one.end[0], two.end) == ("aborted", ("completed", ""))


def test_a_step_that_cannot_begin_fails_its_requests_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(engine: EngineThread) -> None:
        raise ValueError("no memory for it")

    one, two = served(StagedExecutor(), fail)
    assert one.end == ("failed", "no memory for it")
    assert (two.tokens, two.end) == (B, ("completed", ""))
    assert "a step of the engine failed" in capsys.readouterr().err


def test_nothing_is_in_flight_when_all_ranks_do_something_else() -> None:
    executor = StagedExecutor()
    log = DrainedLog(executor)

    async def use(one: Controlled) -> None:
        one.engine.start(one.report)
        await one.make(TransitionKind.START)
        executor.before_step = lambda: threading.Event().wait(0.002) and None
        listeners = [one.submit(name) for name in "ab"]
        while 2 not in executor.in_flight:
            await asyncio.sleep(0.001)
        await one.make(TransitionKind.PAUSE)
        await one.make(TransitionKind.SUSPEND, Mode.DROP)
        assert one.engine.status().used_blocks == 0
        await one.make(TransitionKind.RESUME)
        for listener in listeners:
            await listener.ended.wait()
            assert listener.tokens == A
        one.submit("c")
        one.submit("d")
        count = len(executor.begun)
        while len(executor.begun) < count + 4:
            await asyncio.sleep(0.001)

    one = Controlled(executor=executor, log=log, limits=TWO)
    run(use(one))
    assert one.engine.stop()
    assert log.open == [0] * len(log.open)
    assert len(log.open) > 8


def test_a_follower_makes_the_same_steps_in_their_order() -> None:
    executor, computed = StagedExecutor(), CountingFollower()
    log = QueueLog()
    follower = Follower(computed, queue_limits(TWO), receive=log.receive)
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(follower.run()), daemon=True)
    thread.start()

    async def use() -> None:
        engine = EngineThread(executor, TWO, ranks=log)
        engine.start()
        listeners = [Listener() for _ in "abc"]
        for name, listener in zip("abc", listeners):
            engine.submit(request(name, max_new_tokens=9, stop_tokens=ENDLESS), listener)
        for listener in listeners:
            await listener.ended.wait()
        assert engine.stop()

    run(use())
    thread.join(HANG_S)
    assert ended == ["the engine was stopped"]
    assert computed.steps == executor.steps
    assert max(executor.in_flight) == 2
