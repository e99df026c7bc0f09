"""Bodies that are too large, too slow or no JSON, and clients that leave while they send."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from megatron.serving.admission import stopping
from megatron.serving.api_errors import ApiError
from megatron.serving.responses import (
    Chunks,
    ClientGoneError,
    EventStream,
    ignored_header,
    read_body,
    unless_client_leaves,
)
from tests.support.serving.calls import app_of, ask, call, run
from tests.support.serving.fake_engine import FakeEngine


def request_of(messages: Iterator[Any], content_type: str = "application/json") -> Request:
    async def receive() -> Any:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    headers = [(b"content-type", content_type.encode())]
    return Request({"type": "http", "headers": headers}, receive)


def part(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.request", "body": data, "more_body": more}


def test_a_body_arrives_in_any_parts() -> None:
    request = request_of(iter([part(b"{"), part(b"}", more=False)]), "Application/JSON; charset=x")
    assert run(read_body(request, most=2, timeout_s=1)) == b"{}"


@pytest.mark.parametrize(
    ("messages", "message", "status"),
    [
        ([part(b"12"), part(b"3456", more=False)], "too large; found: 6 bytes; fix: send 5", 413),
        ([part(b"1" * 21)], "too large; found: 21 bytes; fix: send 5", 413),
        ([part(b"123")], "did not come in time; found: 3 bytes in 0.02 seconds", 408),
    ],
)
def test_a_body_that_is_too_large_or_too_slow_is_refused(
    messages: list[Any], message: str, status: int
) -> None:
    with pytest.raises(ApiError) as caught:
        run(read_body(request_of(iter(messages)), most=5, timeout_s=0.02))
    assert message in caught.value.message
    assert caught.value.status == status


def test_a_client_that_leaves_in_the_middle_of_its_body_gets_no_answer() -> None:
    request = request_of(iter([part(b"1"), {"type": "http.disconnect"}]))
    with pytest.raises(ClientGoneError):
        run(read_body(request, most=5, timeout_s=1))


def test_a_large_body_is_refused_by_its_length_alone() -> None:
    app = app_of(FakeEngine(), max_body_kib=1)
    reply = ask(app, "POST", "/v1/completions", b"{}", headers={"content-length": "4097"})
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    assert ask(app, "POST", "/v1/completions", b"x" * 1025).status == 413
    assert ask(app, "POST", "/v1/completions", b"x" * 1024).error["code"] == "invalid_json"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_a_web_page_may_send_anywhere_is_refused(kind: str) -> None:
    headers = {"content-type": kind}
    reply = ask(app_of(FakeEngine()), "POST", "/v1/completions", b"{}", headers=headers)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


def test_work_is_cancelled_when_the_client_leaves() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    request = request_of(iter([{"type": "http.disconnect"}]))
    with pytest.raises(ClientGoneError):
        run(unless_client_leaves(request, work()))
    assert ended == [True]


def test_a_stream_is_closed_when_the_client_leaves() -> None:
    ended = []

    async def chunks() -> Chunks:
        try:
            while True:
                yield {"a": 1}
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(ClientGoneError):
            await EventStream(chunks())(scope, receive, send)

    reply = run(call(application, "POST", "/", leave_when=lambda reply: len(reply.body) > 40))
    assert ended == [True]
    assert not reply.is_complete


def test_names_of_fields_cannot_break_a_header() -> None:
    assert ignored_header(()) == {}
    assert ignored_header(["a", "b\r\nx: y", "\u00e9"]) == {"x-ignored-fields": "a"}
    assert ignored_header(["\n"]) == {"x-ignored-fields": "..."}
    many = ignored_header([f"f{number}" for number in range(30)])["x-ignored-fields"]
    assert many.endswith("f19, ...")


def test_an_error_before_the_first_chunk_has_its_status() -> None:
    async def chunks() -> Chunks:
        raise stopping()
        yield None

    reply = ask(EventStream(chunks()), "POST", "/")
    assert (reply.status, reply.error["code"]) == (503, "server_stopping")
