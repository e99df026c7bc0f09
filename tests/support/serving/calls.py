"""Calls of an ASGI application in one process: requests in, answers out, clients that leave."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from megatron.serving.admission import Admission
from megatron.serving.app import server_app
from megatron.serving.engine_client import EngineClient
from megatron.serving.generation import ServerBackend
from megatron.serving.limits import ServerLimits
from megatron.serving.metrics import ServerMetrics
from tests.support.deadlines import HANG_S
from tests.support.serving.models import served_model


@dataclass
class Reply:
    """An answer as it was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error of the body."""
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream, with "[DONE]" as it is; comments are left out."""
        lines = [part for part in self.body.decode().split("\n\n") if part]
        data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


def backend_of(engine: EngineClient, **changes: Any) -> ServerBackend:
    """What an application needs; `changes` are limits, or a `model`."""
    model = changes.pop("model", None) or served_model()
    limits = ServerLimits(**changes)
    metrics = ServerMetrics(model.name, engine.status)
    return ServerBackend(model, engine, limits, Admission(limits.max_requests), metrics)


def app_of(engine: EngineClient, **limits: Any) -> ASGIApp:
    """An application without keys."""
    return server_app(backend_of(engine, **limits))


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave_when: Callable[[Reply], bool] = lambda reply: False,
) -> Reply:
    """Send a request and return its answer; the client leaves when `leave_when` is true of it.

    `body` is JSON, or bytes as they are.
    """
    data = body if isinstance(body, bytes) else (b"" if body is None else json.dumps(body).encode())
    given = {"host": "127.0.0.1", "content-type": "application/json"}
    given |= {"content-length": str(len(data))} | dict(headers or {})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    reply, left, sent = Reply(), asyncio.Event(), False

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            raw = message.get("headers", ())
            reply.headers = {name.decode().lower(): value.decode() for name, value in raw}
        else:
            reply.body += message.get("body", b"")
            reply.is_complete = not message.get("more_body", False)
        if leave_when(reply):
            left.set()
            await asyncio.sleep(0)

    async with asyncio.timeout(HANG_S):
        await app(scope, receive, send)
    return reply


def run(work: Awaitable[Any]) -> Any:
    """Run a coroutine to its end, within the time of a test."""

    async def within() -> Any:
        async with asyncio.timeout(HANG_S):
            return await work

    return asyncio.run(within())


def ask(app: ASGIApp, method: str, path: str, body: object = None, **options: Any) -> Reply:
    """`call` in an event loop of its own."""
    reply = run(call(app, method, path, body, **options))
    assert isinstance(reply, Reply)
    return reply
