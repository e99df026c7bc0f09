"""The soak of the server finds requests that never end, blocks that are kept, memory that grows."""

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.inference.http_client import HttpAnswer
from megatron.serving.engine_client import EngineStatus
from tests.faults import serving_soak
from tests.faults.serving_soak import (
    Minute,
    Soaked,
    SoakError,
    freeze,
    memory_problems,
    soak,
    table,
)
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import run
from tests.support.serving.fake_engine import FakeEngine
from tests.support.serving.live import LiveServer, live
from tests.support.serving.mixed_load import (
    LoadReport,
    draw_load_request,
    end_of_answer,
    run_mixed_load,
)
from tests.support.serving.models import CONTEXT

NEVER_S = 1e9
LOAD_S = 1.0


async def soaked(
    engine: FakeEngine, *, seconds: float = LOAD_S, **limits: Any
) -> serving_soak.ServingSoak:
    async with live(engine, **limits) as server:
        place = Soaked(server.port, [os.getpid()])
        return await soak(place, seconds=seconds, seed=1, every_s=0.4, mean_s=NEVER_S)


@pytest.fixture(autouse=True)
def _small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_soak, "CONTEXT", CONTEXT)


@pytest.mark.slow
def test_a_server_that_answers_has_no_problems_and_all_sorts_in_its_table() -> None:
    found = run(soaked(FakeEngine(), seconds=3 * LOAD_S, max_requests=6))
    assert found.problems == []
    assert found.load.of_end("completed") > 20
    assert found.load.of_end("refused") > 5
    assert found.load.of_end("refused: busy") > 0
    text = table(found)
    rows = [line.split(" | ")[0] for line in text.splitlines()]
    assert text.endswith("requests, of which 0 hung; events: none")
    assert {"| client leaves", "| bad body", "| chat", "| all", "| 0"} <= set(rows)
    assert all(each.memory > 1 << 20 for each in found.minutes)


async def loaded(server: LiveServer, **options: Any) -> LoadReport:
    until = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, until.set)
    return await run_mixed_load(
        server.port, clients=8, until=until, seed=2, context=CONTEXT, **options
    )


@pytest.mark.slow
def test_a_request_that_never_ends_is_found() -> None:
    async def use() -> LoadReport:
        engine = FakeEngine()
        engine.is_silent = True
        async with live(engine) as server:
            return await loaded(server, deadline_s=0.4)

    report = run(use())
    assert report.of_end("hung") > 0
    assert all(re.search(": hung no end in 0.4 s$", problem) for problem in report.problems)


@pytest.mark.slow
def test_blocks_that_are_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_soak, "DRAINED_WITHIN_S", 0.1)
    engine = FakeEngine()
    kept = EngineStatus(state="running", blocks=8, used_blocks=2)
    monkeypatch.setattr(engine, "status", lambda: kept)

    found = run(soaked(engine))
    (problem,) = found.problems
    assert problem == "the engine still holds {'running': 0, 'waiting': 0, 'used_blocks': 2}"


def answer(status: int, body: bytes = b"{}", *, is_complete: bool = True) -> HttpAnswer:
    return HttpAnswer(status=status, pieces=[(0.0, body)], is_complete=is_complete)


@pytest.mark.parametrize(
    ("given", "end"),
    [
        (answer(200), "completed"),
        (answer(200, b"data: {}\n\ndata: [DONE]\n\n"), "completed"),
        (answer(200, b"data: {}\n\n"), "failed"),
        (answer(200, b': a\n\ndata: {"error": {"code": "deadline_exceeded"}}\n\n'), "expired"),
        (answer(200, b'data: {"error": {"code": "internal"}}\n\n'), "failed"),
        (answer(200, is_complete=False), "broken"),
        (answer(413), "refused"),
        (answer(429), "refused: busy"),
        (answer(504), "expired"),
        (answer(500), "failed"),
    ],
)
def test_every_answer_is_one_end(given: HttpAnswer, end: str) -> None:
    assert end_of_answer(given)[0] == end


def test_an_end_that_a_sort_may_not_have_is_a_problem() -> None:
    drawn = random.Random(3)
    requests = [draw_load_request(drawn, CONTEXT) for _ in range(300)]
    bad = next(each for each in requests if each.sort == "bad body")
    report = LoadReport()
    report.add(bad, "refused", "")
    assert report.problems == []
    report.add(bad, "completed", "with status 200")
    assert report.problems == ["bad body: completed with status 200"]


def test_memory_that_grows_after_the_first_third_is_a_problem() -> None:
    def minutes(*mib: int) -> list[Minute]:
        return [Minute(at, each << 20, 0) for at, each in enumerate(mib)]

    assert memory_problems(minutes(100, 300, 310, 311, 312, 313)) == []
    assert memory_problems(minutes(100, 900)) == []
    (problem,) = memory_problems(minutes(100, 200, 300, 310, 330, 400))
    assert problem == "memory grew by 90 MiB from the second third to the last one"


def test_a_rank_is_stopped_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, str]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal.name)))
    monkeypatch.setattr(serving_soak, "STOPPED_S", 0.0)
    run(serving_soak.stop_a_rank_for_a_while(Soaked(1, [7]), random.Random(0)))
    assert sent == [(7, "SIGSTOP"), (7, "SIGCONT")]


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_is_killed_and_all_are_started_again() -> None:
    began = time.monotonic()
    with sleeping() as rank:
        server = Soaked(1, [rank.pid], start_again=lambda: [8, 9])
        run(serving_soak.kill_a_rank(server, random.Random(0)))
        assert rank.wait(HANG_S) == -signal.SIGKILL
    assert (server.pids, server.is_lost) == ([8, 9], False)
    assert server.was_lost(began)
    assert not server.was_lost(time.monotonic())


def test_a_rank_that_outlives_another_one_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_soak, "ENDED_WITHIN_S", 0.1)
    with sleeping() as one, sleeping() as two:
        server = Soaked(1, [one.pid, two.pid])
        with pytest.raises(SoakError, match="ranks still run 0 s after SIGKILL of another"):
            run(serving_soak.kill_a_rank(server, random.Random(0)))
    assert server.is_lost


@pytest.mark.slow
def test_an_operator_that_is_refused_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_soak, "EVENTS", dict.fromkeys(serving_soak.EVENTS, freeze))

    async def use() -> serving_soak.ServingSoak:
        async with live(FakeEngine()) as server:
            place = Soaked(server.port, [os.getpid()])
            return await soak(place, seconds=HANG_S, seed=1, every_s=0.4, mean_s=0.01)

    (problem,) = run(use()).problems
    assert "pause {'mode': 'freeze'}: status 404" in problem


@pytest.mark.slow
def test_what_breaks_off_while_a_rank_is_lost_is_no_problem_but_hanging_is() -> None:
    async def use(engine: FakeEngine) -> LoadReport:
        async with live(engine) as server:
            return await loaded(server, deadline_s=0.4, was_lost=lambda since: True)

    failing, silent = FakeEngine(), FakeEngine()
    failing.ends_after = (0, "failed")
    silent.is_silent = True
    report = run(use(failing))
    assert report.of_end("server lost") > 0
    assert report.problems == []
    assert run(use(silent)).of_end("hung") > 0
