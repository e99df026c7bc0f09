"""A job waits for its engine for a bounded time, and ends all its requests."""

import time
from contextlib import aclosing

import pytest

from megatron.serving import generation
from megatron.serving.api_errors import ApiError
from megatron.serving.bodies import CompletionBody
from megatron.serving.conversion import JobContext, completion_job
from megatron.serving.generation import JobRun, Usage
from tests.support.serving.calls import backend_of, run
from tests.support.serving.fake_engine import FakeEngine


def run_of(engine: FakeEngine, **fields: object) -> JobRun:
    backend = backend_of(engine, request_timeout=1)
    at = JobContext(backend.model, backend.limits, "a", 0, time.monotonic_ns())
    return JobRun(completion_job(CompletionBody(prompt="a", **fields), at), backend)


async def parts_of(job: JobRun) -> list[object]:
    async with aclosing(job.parts()) as parts:
        return [part async for part in parts]


def test_an_engine_that_forgets_a_deadline_does_not_hold_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "_LOOK_S", 0.01)
    monkeypatch.setattr(generation, "_GRACE_NS", -999_000_000)
    engine = FakeEngine()
    engine.is_silent = True
    with pytest.raises(ApiError, match="took longer than 1 seconds") as caught:
        run(parts_of(run_of(engine)))
    assert caught.value.found == "the engine has not answered"
    assert engine.running == 0


def test_a_job_that_is_closed_early_gives_its_place_and_its_request_back() -> None:
    engine = FakeEngine(delay_s=5.0)
    job = run_of(engine, n=2)

    async def close_early() -> None:
        parts = job.parts()
        assert await anext(parts) is None
        assert job._backend.admission.prompts == 1
        await parts.aclose()

    run(close_early())
    assert job._backend.admission.prompts == 0
    assert engine.aborted == ["a-0"]


def test_a_drain_that_is_over_ends_a_job_with_a_reason() -> None:
    job = run_of(FakeEngine(delay_s=5.0))

    async def drain() -> None:
        parts = job.parts()
        await anext(parts)
        assert await job._backend.admission.drain(0) == 1
        async for _ in parts:
            pass

    with pytest.raises(ApiError, match="the server stops"):
        run(drain())


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    job = run_of(FakeEngine("abcdef"), stop="c")
    run(parts_of(job))
    assert job.usage == Usage(1, 3)
