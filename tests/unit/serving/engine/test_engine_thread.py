"""A thread that owns scheduler and model answers every request exactly once, whatever fails."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.inference.constraint import grammar_table
from megatron.inference.forward import SliceResult
from megatron.inference.grammar import Grammar, GrammarKind
from megatron.inference.logprobs import TokenLogprobs
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine.checked_request import sampling_params
from megatron.serving.engine.engine_thread import EngineAbilities, EngineThread
from megatron.serving.engine_client import (
    EngineEvent,
    EngineQueueFullError,
    EngineRequest,
    EngineUnavailableError,
    PromptComputed,
    RequestEnded,
    RequestRefusedError,
    SamplingOptions,
    TokenDrawn,
    TokenScore,
)
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run

STOP = 9
LIMITS = SchedulerLimits(blocks=16, block_size=4, max_length=32, vocab_size=100, max_queued=2)


class CountingExecutor:
    """Draws the last token and one, and notes what it was asked for."""

    def __init__(self) -> None:
        self.steps: list[ForwardPlan] = []
        self.draws: list[Mapping[int, SequenceDraw]] = []
        self.before_step: Callable[[], None] = lambda: None
        self.bad_token: int | None = None  # after which scores are not finite

    def start(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Callable[[], Sequence[SliceResult]]:
        return partial(self.run, plan, draws)

    def run(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> Sequence[SliceResult]:
        self.before_step()
        self.steps.append(plan)
        self.draws.append(draws)
        scores = TokenLogprobs(-1.0, ((5, -0.5),))
        return [
            SliceResult(each.sequence, is_finite=False)
            if each.tokens[-1] == self.bad_token
            else SliceResult(
                each.sequence,
                (each.tokens[-1] + 1,) if each.samples else (),
                (scores,) if each.samples else (),
                tuple(TokenLogprobs(-float(target), ()) for target in each.targets),
                torch.tensor([[token] * 2 for token in each.tokens]) if each.embeds else None,
            )
            for each in plan.slices
        ]


class OneMore:
    """Proposes the tokens that a `CountingExecutor` draws, the last of which is wrong."""

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        rooms = {part.sequence: (part.tokens[-1], part.draft_room) for part in plan.slices}
        return {
            sequence: [*range(last + 1, last + room), 0]
            for sequence, (last, room) in rooms.items()
            if room
        }


class CheckingExecutor(CountingExecutor):
    """Draws the token before and one after each proposed token as well."""

    def run(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> Sequence[SliceResult]:
        results = super().run(plan, draws)
        found = []
        for each, result in zip(plan.slices, results):
            drawn = [token + 1 for token in each.tokens[-each.drafts - 1 :]]
            right = 0
            while right < each.drafts and drawn[right] == each.tokens[right - each.drafts]:
                right += 1
            scores = result.logprobs * (right + 1)
            tokens = tuple(drawn[: right + 1]) if each.samples else ()
            found.append(SliceResult(each.sequence, tokens, scores, drafts=each.drafts))
        return found


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.ended = asyncio.Event()

    def __call__(self, event: EngineEvent) -> None:
        assert not self.ended.is_set(), "an event after the last one"
        self.events.append(event)
        if isinstance(event, RequestEnded):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, TokenDrawn)]

    @property
    def end(self) -> tuple[str, str]:
        last = self.events[-1]
        assert isinstance(last, RequestEnded)
        return last.state, last.detail


def request(name: str = "a", **changes: Any) -> EngineRequest:
    values = {"prompt": (1, 2), "max_new_tokens": 3, "stop_tokens": frozenset({STOP})} | changes
    return EngineRequest(id=name, **values)


def served(
    *requests: EngineRequest,
    executor: CountingExecutor | None = None,
    after: Callable[[EngineThread], None] = lambda engine: None,
    limits: SchedulerLimits = LIMITS,
    drafter: OneMore | None = None,
) -> tuple[EngineThread, list[Listener]]:
    """Submit requests to a new engine, wait for their ends, and stop it."""
    limits = replace(limits, speculative_tokens=0 if drafter is None else 3)
    engine = EngineThread(
        executor or CountingExecutor(), limits, abilities=EngineAbilities(drafter=drafter)
    )

    async def submit() -> list[Listener]:
        engine.start()
        listeners = [Listener() for _ in requests]
        for each, listener in zip(requests, listeners):
            engine.submit(each, listener)
        after(engine)
        await asyncio.gather(*(listener.ended.wait() for listener in listeners))
        return listeners

    try:
        return engine, run(submit())
    finally:
        assert engine.stop()


def test_tokens_come_in_order_and_the_end_comes_once() -> None:
    engine, (one, two) = served(request(), request("b", prompt=(6,), max_new_tokens=9))
    assert (one.tokens, one.end) == ([3, 4, 5], ("completed", ""))
    assert (two.tokens, two.end) == ([7, 8, STOP], ("completed", ""))
    assert one.events[0] == PromptComputed()
    finishes = [[event.finish for event in each.events[1:-1]] for each in (one, two)]
    assert finishes == [[None, None, "length"], [None, None, "stop"]]
    status = engine.status()
    assert (status.generated_tokens, status.prompt_tokens, status.used_blocks) == (6, 3, 0)


def test_proposed_tokens_are_told_of_and_counted_up_to_the_end_of_their_sample() -> None:
    long = request(prompt=(10,), max_new_tokens=9)
    stopped = request("b", prompt=(4,), max_new_tokens=9)
    engine, (one, two) = served(long, stopped, executor=CheckingExecutor(), drafter=OneMore())
    assert (one.tokens, one.end) == (list(range(11, 20)), ("completed", ""))
    assert (two.tokens, two.end) == ([5, 6, 7, 8, STOP], ("completed", ""))
    last = two.events[-2]
    assert isinstance(last, TokenDrawn)
    assert last.finish == "stop"
    status = engine.status()
    assert status.generated_tokens == 9 + 5
    # Of each three proposed ones two are right, and one is drawn beside; b ends within a step.
    assert (status.drafts, status.draft_tokens, status.accepted_tokens) == (5, 14, 9)


BYTES = text_rules(build_tokenizer(tokenizer_type="ByteTokenizer"))
EOD = 256


def constrained(grammar: Grammar | None, **changes: Any) -> EngineRequest:
    values: dict[str, Any] = {"prompt": (65,), "max_new_tokens": 9, "grammar": grammar}
    return request(**(values | {"stop_tokens": frozenset({EOD})} | changes))


def letters(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_a_request_whose_tokens_do_not_match_its_grammar_fails_alone() -> None:
    # The executor draws as it likes: what comes after "A" is "B", "C", ...
    limits = replace(LIMITS, vocab_size=257)
    table = grammar_table(BYTES, 257)
    engine = EngineThread(CountingExecutor(), limits, abilities=EngineAbilities(grammars=table))
    names = {"a": letters("BCD+"), "b": letters("BCDEF[A-Z]*"), "c": None}
    found = listened(engine, [constrained(names[name], name=name) for name in names])
    assert found["a"].tokens == [66, 67, 68]
    assert found["a"].end == ("failed", "its grammar does not allow the tokens that were drawn")
    assert found["b"].tokens == found["c"].tokens == list(range(66, 75))
    assert {found[name].end for name in "bc"} == {("completed", "")}


def test_every_sample_has_a_constraint_of_its_own() -> None:
    table = grammar_table(BYTES, 257)
    executor = CountingExecutor()
    engine = EngineThread(
        executor, replace(LIMITS, vocab_size=257), abilities=EngineAbilities(grammars=table)
    )
    (one,) = listened(engine, [constrained(letters("[B-Z]*"), samples=2)]).values()
    assert one.end == ("completed", "")
    constraints = {id(draw.constraint) for draws in executor.draws for draw in draws.values()}
    assert len(constraints) == 2


def test_grammars_that_cannot_be_followed_are_refused() -> None:
    table = grammar_table(BYTES, 257)
    cases: list[tuple[Any, EngineRequest, str]] = [
        (None, constrained(letters("a")), "texts of this model cannot be constrained"),
        (table, constrained(letters("a("), name="b"), "the regular expression cannot be used"),
        (table, constrained(letters("a"), min_new_tokens=1), "ends where it is complete"),
        (table, constrained(letters("a"), stop_tokens=frozenset()), "could not end"),
    ]
    for grammars, refused, message in cases:
        limits = replace(LIMITS, vocab_size=257)
        engine = EngineThread(
            CountingExecutor(), limits, abilities=EngineAbilities(grammars=grammars)
        )
        with pytest.raises(RequestRefusedError, match=message):
            engine.submit(replace(refused, prompt=(1,)), Listener())


def listened(engine: EngineThread, requests: Sequence[EngineRequest]) -> dict[str, Listener]:
    """Submit requests, wait for their ends, and stop the engine."""

    async def submit() -> dict[str, Listener]:
        engine.start()
        listeners = {each.id: Listener() for each in requests}
        for each in requests:
            engine.submit(each, listeners[each.id])
        await asyncio.gather(*(each.ended.wait() for each in listeners.values()))
        return listeners

    try:
        return run(submit())
    finally:
        assert engine.stop()


def test_without_a_drafter_that_fails_requests_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(OneMore):
        calls = 0

        def propose(self, *_: object) -> Mapping[int, Sequence[int]]:
            self.calls += 1
            raise ValueError("no such draft")

    broken = Broken()
    engine, (one,) = served(request(), drafter=broken)
    assert (one.tokens, one.end) == ([3, 4, 5], ("completed", ""))
    assert broken.calls == 1
    said = capsys.readouterr().err
    assert "no tokens are proposed from now on" in said
    assert "no such draft" in said
    assert engine.status().drafts == 0


def test_how_tokens_are_drawn_and_scored_reaches_the_executor() -> None:
    executor = CountingExecutor()
    options = SamplingOptions(temperature=0.5, top_p=0.9, seed=7, logit_bias={3: -1.0})
    _, (listener,) = served(
        request(samples=2, max_new_tokens=2, sampling=options, logprobs=1), executor=executor
    )
    draws = [draw for step in executor.draws for draw in step.values()]
    assert {(draw.seed, draw.top_logprobs, draw.prompt) for draw in draws} == {(7, 1, (1, 2))}
    assert {draw.choice for draw in draws} == {0, 1}
    assert draws[0].params == sampling_params(options)
    assert (draws[0].params.temperature, draws[0].params.logit_bias) == (0.5, ((3, -1.0),))
    assert {event.score for event in listener.events[1:-1]} == {TokenScore(-1.0, ((5, -0.5),))}


def test_a_prompt_is_scored_in_parts_before_its_first_token() -> None:
    executor = CountingExecutor()
    limits = replace(LIMITS, max_tokens_per_step=3, max_sequences=2)
    _, (listener,) = served(
        request(prompt=(1, 2, 3, 4, 5), prompt_logprobs=1), executor=executor, limits=limits
    )
    assert [part.targets for step in executor.steps for part in step.slices][:2] == [
        (2, 3, 4),
        (5,),
    ]
    expected = tuple(TokenScore(-float(token)) for token in (2, 3, 4, 5))
    assert listener.events[0] == PromptComputed(expected)


def test_hidden_states_become_an_embedding_or_fail_their_request() -> None:
    limits = replace(LIMITS, max_tokens_per_step=3, max_sequences=3)
    embeds = {"max_new_tokens": 0, "embeds": True}
    _, (good, bad) = served(
        request(prompt=(1, 3, 3, 1, 2), **embeds),
        request("b", prompt=(0, 0), **embeds),
        limits=limits,
    )
    half = 0.5**0.5  # of the states (token, token)
    (computed, end) = good.events
    assert isinstance(computed, PromptComputed)
    assert computed.embedding == pytest.approx((half, half))
    assert end == RequestEnded("completed")
    assert bad.end == ("failed", "the embedding of a prompt has no direction")


def test_a_request_without_new_tokens_ends_with_its_prompt() -> None:
    _, (listener,) = served(request(prompt_logprobs=0, max_new_tokens=0))
    assert listener.events == [PromptComputed((TokenScore(-2.0),)), RequestEnded("completed")]


def test_a_sample_whose_text_is_complete_ends_at_once() -> None:
    executor = CountingExecutor()
    engine: list[EngineThread] = []

    def end_after_second_step() -> None:
        if len(executor.steps) == 2:  # and the third begins
            engine[0].end_sample("a", 0)

    executor.before_step = end_after_second_step
    _, (listener,) = served(
        request(max_new_tokens=20, stop_tokens=frozenset()),
        executor=executor,
        after=engine.append,
    )
    assert listener.end == ("completed", "")
    assert len(listener.tokens) == 3  # the third was being drawn


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    executor = CountingExecutor()

    def fail_first() -> None:
        executor.before_step = lambda: None
        raise ValueError("no memory for it")

    executor.before_step = fail_first

    async def use() -> tuple[Listener, Listener]:
        engine = EngineThread(executor, LIMITS)
        engine.start()
        first, second = Listener(), Listener()
        engine.submit(request("a"), first)
        await first.ended.wait()
        engine.submit(request("b"), second)
        await second.ended.wait()
        assert engine.stop()
        return first, second

    first, second = run(use())
    assert first.end == ("failed", "no memory for it")
    assert second.end == ("completed", "")
    assert "a step of the engine failed" in capsys.readouterr().err


def test_scores_that_are_not_finite_fail_their_request_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    executor = CountingExecutor()
    executor.bad_token = 4
    _, (bad, good) = served(
        request("a", max_new_tokens=9, samples=2), request("b", prompt=(6,)), executor=executor
    )
    assert bad.end[0] == "failed"
    assert "its scores are not finite after 2 new tokens of sample 0; check the" in bad.end[1]
    assert (good.tokens, good.end) == ([7, 8, STOP], ("completed", ""))
    assert "request a failed: its scores are not finite" in capsys.readouterr().err


def test_three_failed_steps_in_a_row_end_the_engine() -> None:
    executor = CountingExecutor()

    def fail() -> None:
        raise ValueError("broken")

    executor.before_step = fail

    async def use() -> EngineThread:
        engine = EngineThread(executor, LIMITS)
        engine.start()
        for name in "abc":
            listener = Listener()
            engine.submit(request(name), listener)
            await listener.ended.wait()
            assert listener.end[0] == "failed"
        engine._thread.join(HANG_S)
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            engine.submit(request("d"), Listener())
        return engine

    status = run(use()).status()
    assert (status.state, status.is_alive) == ("failed", False)
    assert status.detail == "3 steps failed in a row: broken"


def test_a_step_that_does_not_end_is_noticed() -> None:
    executor, go_on = CountingExecutor(), threading.Event()
    executor.before_step = lambda: go_on.wait(HANG_S) and None

    async def use() -> None:
        engine = EngineThread(executor, LIMITS, step_timeout_s=0.05)
        engine.start()
        listener = Listener()
        engine.submit(request(), listener)
        while engine.status().is_alive:
            await asyncio.sleep(0.01)
        assert "a step takes longer than" in engine.status().detail
        go_on.set()
        await listener.ended.wait()
        assert engine.status().is_alive
        assert engine.stop()
        assert engine.status().detail == "it was stopped"

    run(use())


def test_a_deadline_ends_a_request_and_an_abort_too() -> None:
    executor = CountingExecutor()
    executor.before_step = lambda: time.sleep(0.02)
    late = request(max_new_tokens=25, deadline_ns=time.monotonic_ns() + 50_000_000, stop_tokens=())
    _, (listener,) = served(late, executor=executor)
    assert listener.end[0] == "expired"
    assert len(listener.tokens) < 25
    _, (listener,) = served(
        request(max_new_tokens=25, stop_tokens=frozenset()),
        executor=executor,
        after=lambda engine: engine.abort("a"),
    )
    assert listener.end[0] == "aborted"


def test_what_can_never_be_served_is_refused_at_the_door() -> None:
    async def use() -> None:
        engine = EngineThread(CountingExecutor(), LIMITS)
        with pytest.raises(EngineUnavailableError, match="takes no requests"):
            engine.submit(request(), Listener())
        engine.start()
        with pytest.raises(RequestRefusedError, match="longer than the model"):
            engine.submit(request(max_new_tokens=99), Listener())
        assert engine.stop()

    run(use())


def test_a_full_queue_refuses_and_stopping_ends_what_waits() -> None:
    executor, go_on = CountingExecutor(), threading.Event()
    executor.before_step = lambda: go_on.wait(HANG_S) and None
    limits = SchedulerLimits(
        blocks=16, block_size=4, max_length=32, vocab_size=100, max_queued=1, max_sequences=1
    )

    async def use() -> list[str]:
        engine = EngineThread(executor, limits)
        engine.start()
        listeners = [Listener(), Listener()]
        for name, listener in zip("ab", listeners):
            engine.submit(request(name, max_new_tokens=20, stop_tokens=frozenset()), listener)
        with pytest.raises(EngineQueueFullError, match="queue of the engine is full") as caught:
            engine.submit(request("c"), Listener())
        assert caught.value.found == "2 requests"
        stopped = asyncio.ensure_future(asyncio.to_thread(engine.stop))
        await asyncio.sleep(0.02)
        go_on.set()
        assert await stopped
        for listener in listeners:
            await listener.ended.wait()
        return [listener.end[0] for listener in listeners]

    assert run(use()) == ["aborted", "aborted"]


def test_a_reader_whose_loop_is_closed_stops_nobody() -> None:
    executor, go_on = CountingExecutor(), threading.Event()
    executor.before_step = lambda: go_on.wait(HANG_S) and None
    engine = EngineThread(executor, LIMITS)
    engine.start()

    async def leave() -> None:
        engine.submit(request("a"), Listener())

    asyncio.run(leave())
    go_on.set()

    async def use() -> Listener:
        listener = Listener()
        engine.submit(request("b"), listener)
        await listener.ended.wait()
        return listener

    assert run(use()).end[0] == "completed"
    assert engine.stop()


def test_a_draw_that_cannot_be_is_refused_before_it_fails_a_step() -> None:
    options = SamplingOptions(presence_penalty=float("inf"))
    with pytest.raises(RequestRefusedError, match="a penalty of generated tokens is not a finite"):
        served(request(sampling=options))
