"""The benchmark of the server counts from arrivals, and compares contestants that do the same."""

import asyncio
import json
import math
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.inference import serve
from benchmarks.inference.decode import SHAPE
from benchmarks.inference.http_client import HttpAnswer, http_request
from benchmarks.inference.open_loop import (
    TimedRequest,
    latencies,
    poisson_arrivals,
    quantile,
    run_open_loop,
    summary,
)
from benchmarks.inference.serve_worker import PEERS, LoadedRequest
from benchmarks.peers.plain_gpt import LlamaShape
from megatron.errors import NumericsError
from tests.support.examples import examples
from tests.support.serving.calls import run
from tests.support.serving.fake_engine import FakeEngine
from tests.support.serving.live import live


@given(st.floats(0.1, 100), st.integers(1, 50), st.integers(0, 9))
@examples(50)
def test_arrivals_are_those_of_the_seed_and_never_go_back(
    rate: float, count: int, seed: int
) -> None:
    arrivals = poisson_arrivals(rate, count, seed)
    assert arrivals == poisson_arrivals(rate, count, seed)
    assert list(arrivals) == sorted(arrivals)
    assert len(arrivals) == count
    assert poisson_arrivals(math.inf, count, seed) == (0.0,) * count


def test_the_mean_rate_is_the_one_that_was_asked_for() -> None:
    arrivals = poisson_arrivals(5.0, 10_000, 1)
    assert arrivals[-1] / 10_000 == pytest.approx(1 / 5, rel=0.05)  # its deviation is 1 %


def test_requests_are_sent_while_the_server_answers_none() -> None:
    """A client that waited for the first answer would never send the last request."""
    arrivals, sent = [0.0, *[0.001 * at for at in range(1, 11)]], []
    all_sent = asyncio.Event()

    async def send(number: int, arrival: float) -> TimedRequest:
        sent.append(number)
        if len(sent) == len(arrivals):
            all_sent.set()
        await all_sent.wait()
        now = time.monotonic()
        return TimedRequest(arrival=arrival, sent=now, first=now, last=now, tokens=1)

    done = run(run_open_loop(arrivals, send))
    assert sorted(sent) == list(range(11))
    gaps = [each.arrival - done[0].arrival for each in done]
    assert gaps == pytest.approx(arrivals)


def test_a_request_that_is_sent_late_counts_from_its_arrival() -> None:
    late = TimedRequest(arrival=1.0, sent=3.0, first=4.0, last=5.0, tokens=3)
    assert latencies([late]) == {"first token": [3.0], "per token": [0.5], "whole": [4.0]}


def test_failures_never_end_and_rejections_are_counted_apart() -> None:
    done = [
        TimedRequest(arrival=0.0, sent=0.0, first=1.0, last=2.0, tokens=11),
        TimedRequest(arrival=1.0, sent=1.5, outcome="failed"),
        TimedRequest(arrival=1.0, sent=1.0, outcome="rejected"),
    ]
    found = summary([done, done])
    assert [found[name] for name in ("completed", "failed", "rejected")] == [2, 2, 2]
    assert (found["whole p50"], found["whole p90"]) == (2.0, math.inf)
    assert (found["per token p50"], found["per token p99"]) == (pytest.approx(0.1), math.inf)
    assert found["tokens per second"] == pytest.approx(22 / 4)
    assert found["send lag p99"] == 0.5
    assert math.isnan(quantile([], 50))


def test_answers_come_in_pieces_with_times_and_clients_may_leave() -> None:
    body = b'{"prompt": "a", "stream": true}'

    async def use() -> tuple[HttpAnswer, HttpAnswer, HttpAnswer]:
        engine = FakeEngine()
        async with live(engine) as server:
            whole = await http_request(server.port, "POST", "/v1/completions", body)
            engine.waits_after = 3
            left = await http_request(server.port, "POST", "/v1/completions", body, leave_after=2)
            engine.goes_on.set()
            missing = await http_request(server.port, "GET", "/nowhere")
        with pytest.raises(OSError, match="Connect call failed"):
            await http_request(server.port, "GET", "/")
        return whole, left, missing

    whole, left, missing = run(use())
    assert (whole.status, whole.is_complete, whole.has_left) == (200, True, False)
    times = [came for came, _ in whole.events()]
    assert times == sorted(times)
    assert [data for _, data in whole.events()][-1] == "[DONE]"
    assert (left.is_complete, left.has_left, len(left.pieces)) == (False, True, 2)
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")


def streamed(*texts: str, end: str = "[DONE]") -> HttpAnswer:
    chunks = [json.dumps({"choices": [{"text": text}]}) for text in texts]
    pieces = [(float(at), f"data: {data}\n\n".encode()) for at, data in enumerate([*chunks, end])]
    return HttpAnswer(status=200, pieces=pieces, is_complete=True)


def test_a_streamed_answer_has_its_tokens_and_their_times() -> None:
    times, tokens = serve.timed_answer(streamed("", "17", " 4", " 9"), 0.5, 0.6, 3)
    assert tokens == [17, 4, 9]
    assert (times.first, times.last, times.tokens, times.outcome) == (1.0, 3.0, 3, "completed")
    for answer, new, outcome in (
        (streamed("17"), 2, "failed"),
        (streamed("17", end="{}"), 1, "failed"),
        (HttpAnswer(status=429), 1, "rejected"),
        (HttpAnswer(status=500), 1, "failed"),
    ):
        times, tokens = serve.timed_answer(answer, 0.0, 0.0, new)
        assert (times.outcome, tokens) == (outcome, None)


def test_contestants_that_choose_other_tokens_are_an_error() -> None:
    serve.check_same_tokens({"ours": [[1], None], "other": [[1], [2]]})
    with pytest.raises(NumericsError, match="contestants choose other tokens"):
        serve.check_same_tokens({"ours": [[1]], "other": [[2]]})


def test_a_contestant_that_ends_or_says_nothing_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_MOST_S", 0.2)
    for words, found in ((["echo", "hello"], "exit code 0"), (["sleep", "60"], "exit code -9")):
        with (
            subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
            pytest.raises(serve.WorkerError, match="ended without an answer") as caught,
        ):
            serve._next_line(process, lambda line: line == "ready\n")
        assert str(caught.value.found).startswith(found)


def test_both_peers_take_requests_as_they_arrive_and_choose_the_same() -> None:
    shape = LlamaShape(**{**asdict(SHAPE), "layers": 1})
    load = [LoadedRequest(0.0, (5, 6, 7, 8, 9), 3), LoadedRequest(0.05, (4, 3, 2), 2)]
    found = [make(shape, "fp32")(load) for make in PEERS.values()]
    one, other = ([each.tokens for each in answers] for answers in found)
    assert one == other
    assert [len(tokens) for tokens in one] == [3, 2]
    for answers in found:
        for each, request in zip(answers, load):
            assert each.times == sorted(each.times)
            assert each.times[0] > request.arrival


@pytest.mark.wide
def test_all_contestants_are_measured_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "serve.json"
    flags = ["--layers", "1", "--requests", "4", "--seeds", "2", "--rate", "20", "inf"]
    serve.main([*flags, "--prompt", "9", "--new", "3", "5", "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert [row["contestant"] for row in rows] == [serve.OURS, *PEERS] * 2
    assert all(row["completed"] == 8 for row in rows)
    assert "| all at once | ours | 8 | 0 |" in capsys.readouterr().out
