"""The connection of one rank to the coordinator: made again whenever it breaks."""

import asyncio
import time
from collections.abc import Callable

from megatron.control.frames import CONNECT_S, close_writer, frame_of, read_frame
from megatron.scheduling.control.member import MemberEvent
from megatron.scheduling.control.messages import MessageError
from megatron.scheduling.control.rank_service import EngineLoad, RankOutput, RankService


class RankConnection:
    """A `RankService` with a socket and a clock.

    Args:
        service: what decides.
        host: where the coordinator listens.
        port: and on which port.
        on_output: gets the tasks and requests for the engine; returns at once.
        secret: what the coordinator wants a connection to begin with.
        load: returns what heartbeats tell.
        tick_s: how often the clock is looked at.
        clock_ns: a monotonic clock.
    """

    def __init__(
        self,
        service: RankService,
        host: str,
        port: int,
        on_output: Callable[[RankOutput], None],
        *,
        secret: bytes | None = None,
        load: Callable[[], EngineLoad] = EngineLoad,
        tick_s: float = 0.25,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.service = service
        self._address, self._on_output = (host, port), on_output
        self._secret = secret
        self._load, self._tick_s, self._clock_ns = load, tick_s, clock_ns
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Stay connected until the task is cancelled."""
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                await self._connect_and_read()
                await asyncio.sleep(self._tick_s)
        finally:
            ticking.cancel()

    def take(self, event: MemberEvent) -> None:
        """Take an event of the engine, such as that a transition is prepared."""
        self._handle(self.service.take(event))

    def send(self, data: bytes) -> bool:
        """Send a message about a request; return whether there is a connection."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(frame_of(data))
        return True

    async def _connect_and_read(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(*self._address)
        except (OSError, TimeoutError):
            return
        self._writer = writer
        if self._secret is not None:
            writer.write(frame_of(self._secret))
        self._handle(self.service.hello())
        try:
            # The coordinator answers heartbeats: silence for the whole lease is a broken line.
            silence_s = self.service.timing.lease_ns / 1e9
            while (data := await read_frame(reader, silence_s)) is not None:
                self._handle(self.service.receive(data, self._clock_ns()))
        except (MessageError, TimeoutError, OSError):
            return
        finally:
            self._writer = None
            await close_writer(writer)

    async def _tick(self) -> None:
        while True:
            self._handle(self.service.tick(self._clock_ns(), self._load()))
            await asyncio.sleep(self._tick_s)

    def _handle(self, output: RankOutput) -> None:
        if output.tasks or output.requests:  # before anyone can know that they are acknowledged
            self._on_output(output)
        for data in output.data:
            self.send(data)  # what is lost is repeated
