"""The coordinator of an inference engine on a TCP port.

A connection that sends what is no frame, or does not read what it is sent, is closed; all others
and the coordinator go on.
"""

import asyncio
import hmac
import itertools
import time
from collections.abc import Callable, Iterable

from megatron.control.frames import (
    FRAME_S,
    MAX_BACKLOG_BYTES,
    close_writer,
    frame_of,
    read_frame,
)
from megatron.scheduling.control.messages import MessageError
from megatron.scheduling.control.service import ControlService, Outgoing

IDLE_S = 3600.0  # a client may wait for its request so long without a word


class CoordinatorServer:
    """A `ControlService` with sockets and a clock.

    Args:
        service: what decides.
        secret: what every connection has to begin with; None: nothing.
        tick_s: how often it looks at the clock; about half of a heartbeat.
        clock_ns: a monotonic clock.
    """

    def __init__(
        self,
        service: ControlService,
        *,
        secret: bytes | None = None,
        tick_s: float = 0.25,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.service, self._secret = service, secret
        self._tick_s, self._clock_ns = tick_s, clock_ns
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._names = (f"connection {number}" for number in itertools.count(1))
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; return the port, which the system chooses for 0."""
        self._server = await asyncio.start_server(self._serve, host, port)
        self._ticking = asyncio.create_task(self._tick())
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            await close_writer(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = next(self._names)
        self._writers[name] = writer
        self.service.connect(name)
        try:
            if not await self._knows_secret(reader):
                self.service.counts["strangers"] += 1
                return
            while (data := await read_frame(reader, IDLE_S)) is not None:
                self._send(self.service.receive(name, data, self._clock_ns()))
        except (MessageError, TimeoutError, OSError):
            self.service.counts["broken_connections"] += 1
        finally:
            self._writers.pop(name, None)
            self._send(self.service.disconnect(name, self._clock_ns()))
            await close_writer(writer)

    async def _knows_secret(self, reader: asyncio.StreamReader) -> bool:
        if self._secret is None:
            return True
        return hmac.compare_digest(await read_frame(reader, FRAME_S) or b"", self._secret)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._send(self.service.tick(self._clock_ns()))

    def _send(self, outgoing: Iterable[Outgoing]) -> None:
        for connection, data in outgoing:
            writer = self._writers.get(connection)
            if writer is None or writer.is_closing():
                continue  # its own task forgets it
            writer.write(frame_of(data))
            if writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                self.service.counts["slow_readers"] += 1
                writer.transport.abort()
