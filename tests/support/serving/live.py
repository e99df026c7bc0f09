"""A server on a port of the loopback interface, in the event loop of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from megatron.serving.engine_client import EngineClient
from megatron.serving.server import TextServer, listen
from tests.support.deadlines import HANG_S
from tests.support.serving.calls import backend_of


@dataclass
class LiveServer:
    """A running server."""

    server: TextServer
    port: int
    task: "asyncio.Task[None]"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and send bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """Send bytes and return all that is answered until the connection is closed."""
        reader, writer = await self.send(data)
        async with asyncio.timeout(HANG_S):
            received = await reader.read()
        writer.close()
        return received


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    """A request in HTTP."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def live(
    engine: EngineClient, *, keys: tuple[str, ...] = (), **limits: Any
) -> AsyncIterator[LiveServer]:
    """Serve on a free port; at the end the server is stopped and has to have ended by itself."""
    started = asyncio.Event()
    listener = listen("127.0.0.1", 0)
    server = TextServer(
        backend_of(engine, **limits), host="127.0.0.1", keys=keys, on_start=started.set
    )
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(HANG_S):
            await started.wait()
            yield LiveServer(server, listener.getsockname()[1], task)
            server.stop()
            await task
    finally:
        task.cancel()
