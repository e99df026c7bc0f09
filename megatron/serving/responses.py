"""Answers as bytes, and clients that go away or read nothing while they are sent."""

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron.json_values import JsonObject
from megatron.serving.api_errors import ApiError, ErrorCode

IGNORED_FIELDS = "x-ignored-fields"
_COMMENT = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"
# Times the limit: many clients see no answer to a body that they could not send to its end.
_READ_ALL_THE_SAME = 4
_MOST_NAMES = 20  # of ignored fields in a header
Result = TypeVar("Result")
Chunks: TypeAlias = AsyncGenerator[JsonObject | None, None]


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


def json_response(body: JsonObject, *, ignored: Sequence[str] = ()) -> Response:
    """Return a JSON answer, with the names of fields that had no effect in a header."""
    content = msgspec.json.encode(body)
    return Response(content, media_type="application/json", headers=ignored_header(ignored))


def error_response(error: ApiError) -> Response:
    """Return the answer to a request that is refused."""
    headers = dict(error.headers)
    if error.code in (ErrorCode.BODY_SIZE, ErrorCode.SLOW_BODY):
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(
        msgspec.json.encode(error.body),
        status_code=error.status,
        media_type="application/json",
        headers=headers,
    )


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names fields without effect; none if there are none."""
    plain = [name for name in names if re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII)]
    plain = [*plain[:_MOST_NAMES], *(["..."] if plain[_MOST_NAMES:] or not plain else [])]
    return {IGNORED_FIELDS: ", ".join(plain)} if names else {}


async def read_body(request: Request, *, most: int, timeout_s: float) -> bytes:
    """Return the JSON text of a request.

    Raises:
        ApiError: it is no JSON by its headers, is too large, or does not come in time.
        ClientGoneError: the client went away before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            ErrorCode.MEDIA_TYPE,
            "the body of the request has to be JSON",
            found=f"content-type {kind or '(none)'}",
            fix="send the header Content-Type: application/json",
        )
    length = request.headers.get("content-length", "0")
    size = int(length) if length.isdigit() else 0
    if size > _READ_ALL_THE_SAME * most:
        raise _too_large(size, most)
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size <= most:
                    body += part
                is_last = not message.get("more_body", False)
                if size > _READ_ALL_THE_SAME * most or (is_last and size > most):
                    raise _too_large(size, most)
                if is_last:
                    return bytes(body)
    except TimeoutError as error:
        raise ApiError(
            ErrorCode.SLOW_BODY,
            "the body of the request did not come in time",
            found=f"{size} bytes in {timeout_s:g} seconds",
            fix="send it at once",
        ) from error


async def unless_client_leaves(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """Return the result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGoneError: it has.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancelled(watch)
        await _cancelled(task)


class EventStream:
    """An answer in server-sent events, as OpenAI's interface has it: an ASGI application.

    An error before the first chunk has a status of its own; a later one is an event, without a
    `[DONE]` behind it. `chunks` is closed whatever happens, also when the client goes away. None
    among them becomes a comment, which keeps proxies from closing the connection.
    """

    def __init__(self, chunks: Chunks, *, ignored: Sequence[str] = ()) -> None:
        self._chunks, self._ignored = chunks, ignored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await unless_client_leaves(request, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            try:
                first = await anext(chunks)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            headers |= {"x-accel-buffering": "no", **ignored_header(self._ignored)}
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await _send_body(send, _data(first))
            end = _DONE
            try:
                async for chunk in chunks:
                    await _send_body(send, _data(chunk))
            except ApiError as error:
                end = event(error.body)
            await _send_body(send, end, is_last=True)


async def _send_body(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _data(chunk: JsonObject | None) -> bytes:
    return _COMMENT if chunk is None else event(chunk)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Result] | asyncio.Future[None]) -> None:
    """Cancel a task and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(
        ErrorCode.BODY_SIZE,
        "the body of the request is too large",
        found=f"{size} bytes",
        fix=f"send {most} bytes or fewer",
    )


def event(chunk: JsonObject) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
