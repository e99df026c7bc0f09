"""A thread in which a rank takes part in the control plane, whatever its other threads wait for.

On the first rank it also runs the coordinator, and sends the commands of operators to it.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron.control.client import ControlClient
from megatron.control.coordinator_server import CoordinatorServer
from megatron.control.rank_connection import RankConnection
from megatron.scheduling.control.member import MemberEvent
from megatron.scheduling.control.messages import (
    Answer,
    Command,
    RequestDone,
    RequestProgress,
    ToCoordinator,
    encode_message,
)
from megatron.scheduling.control.rank_service import EngineLoad, RankOutput, RankService
from megatron.scheduling.control.service import ControlService

HOST = "127.0.0.1"  # messages are not encrypted: ranks of one machine
_START_S = 10.0
Result = TypeVar("Result")


class ControlThread:
    """The event loop of one rank's control plane.

    Args:
        service: this rank as a member.
        secret: what every connection begins with; the same on all ranks, and known to nobody else.
        on_output: gets the tasks of the engine, in this thread; returns at once.
        load: returns what heartbeats tell.
    """

    def __init__(
        self,
        service: RankService,
        secret: bytes,
        on_output: Callable[[RankOutput], None],
        *,
        load: Callable[[], EngineLoad] = EngineLoad,
    ) -> None:
        self._service, self._secret = service, secret
        self._on_output, self._load = on_output, load
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._coordinator: CoordinatorServer | None = None
        self._client: ControlClient | None = None
        self._connection: RankConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._on_done: Callable[[RequestDone], None] = _ignore
        self._on_progress: Callable[[RequestProgress], None] = _ignore
        self._thread.start()

    def coordinate(self, service: ControlService) -> int:
        """Run the coordinator here; return the port that ranks connect to."""
        return self._wait_for(self._coordinate(service))

    def listen_to_requests(
        self,
        on_done: Callable[[RequestDone], None],
        on_progress: Callable[[RequestProgress], None],
    ) -> None:
        """Give what comes of requests that are submitted here to functions, in this thread."""
        self._on_done, self._on_progress = on_done, on_progress

    def join(self, port: int) -> None:
        """Connect this rank to the coordinator, and stay connected."""
        self._wait_for(self._join(port))

    def take(self, event: MemberEvent) -> None:
        """Take an event of the engine; from any thread."""
        self._loop.call_soon_threadsafe(self._take, event)

    def send(self, command: Command, *, wait_s: float) -> "concurrent.futures.Future[Answer]":
        """Send a command to the coordinator of this process; from any thread.

        The future has the errors of `ControlClient.send`.
        """
        assert self._client is not None  # noqa: S101  # invariant: of the rank that coordinates
        return asyncio.run_coroutine_threadsafe(
            self._client.send(command, wait_s=wait_s), self._loop
        )

    def send_message(self, message: ToCoordinator) -> None:
        """Send a message about a request of this rank; called in this thread.

        Without a connection it is lost, and so is the rank soon, with its requests.
        """
        if self._connection is not None:
            self._connection.send(encode_message(message))

    def leave(self) -> None:
        """Take part no more: this rank is lost, and stays so; from any thread."""
        self._loop.call_soon_threadsafe(self._leave)

    @property
    def coordinator(self) -> ControlService:
        """The coordinator of this process; its state is a value that does not change."""
        assert self._coordinator is not None  # noqa: S101  # invariant: as above
        return self._coordinator.service

    @property
    def weights(self) -> int:
        """The version of the weights that the coordinator of this process knows."""
        return self.coordinator.state.weights

    @property
    def missing(self) -> list[int]:
        """The ranks that do not take part."""
        return self.coordinator.state.missing

    @property
    def is_fenced(self) -> bool:
        """Whether the coordinator has not been heard for so long that this rank is lost."""
        return self._service.state.is_fenced

    def close(self) -> None:
        """Leave, and end the thread."""
        self._wait_for(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    async def _coordinate(self, service: ControlService) -> int:
        self._coordinator = CoordinatorServer(service, secret=self._secret)
        self._client = ControlClient(
            lambda done: self._on_done(done), lambda progress: self._on_progress(progress)
        )
        async with asyncio.timeout(_START_S):
            port = await self._coordinator.start(HOST)
            await self._client.connect(HOST, port, secret=self._secret)
        return port

    async def _join(self, port: int) -> None:
        self._connection = RankConnection(
            self._service, HOST, port, self._on_output, secret=self._secret, load=self._load
        )
        self._connecting = asyncio.ensure_future(self._connection.run())

    def _take(self, event: MemberEvent) -> None:
        if self._connection is not None:
            self._connection.take(event)

    def _leave(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()

    async def _close(self) -> None:
        async with asyncio.timeout(_START_S):
            if self._client is not None:
                await self._client.close()
            if self._coordinator is not None:
                await self._coordinator.close()
            if self._connecting is not None:
                self._connecting.cancel()
                await asyncio.wait([self._connecting])


def _ignore(message: object) -> None:
    """Ignore a message about a request: none is submitted here."""
