"""A replica answers every request that it is given, also those that it cannot serve."""

import asyncio

import pytest

from megatron.scheduling.control.messages import (
    RequestAbort,
    RequestDone,
    RequestProgress,
    RequestStart,
    ToCoordinator,
)
from megatron.serving.engine_client import EngineRequest, TokenDrawn
from megatron.serving.ranks import replica_requests
from megatron.serving.ranks.payloads import decode_event, encode_request
from megatron.serving.ranks.replica_requests import ReplicaRequests
from tests.support.serving.calls import run
from tests.support.serving.fake_engine import FULL, PAUSED, REFUSED, FakeEngine

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
    *progress, end = sent_by(FakeEngine("abc"), START)
    assert end == RequestDone(2, 5, "u", "completed")
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
