"""A coordinator, ranks and clients on the loopback interface, in one event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from megatron.control.client import ControlClient
from megatron.control.coordinator_server import CoordinatorServer
from megatron.control.rank_connection import RankConnection
from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import Answer, RequestDone, encode_message
from megatron.scheduling.control.rank_service import RankOutput, RankService
from megatron.scheduling.control.service import ControlService
from megatron.scheduling.control.states import CommandKind
from megatron.scheduling.control.timing import ControlTiming
from tests.support.deadlines import HANG_S

MS = 1_000_000
# A lease long beside what a busy machine may delay a task of one event loop.
TIMING = ControlTiming(
    heartbeat_ns=20 * MS, fence_ns=600 * MS, lease_ns=1000 * MS, pause_ns=500 * MS
)
TICK_S = 0.01


@dataclass
class Loopback:
    """What runs, and what it has got.

    Attributes:
        done: ends of requests, as the clients got them.
        seen: requests that ranks were given, as "rank: id".
        busy: ranks that do not finish what they prepare.
    """

    server: CoordinatorServer
    port: int
    done: list[RequestDone] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    ranks: dict[int, RankConnection] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def start_rank(self, number: int, incarnation: int = 1) -> None:
        """Start a rank, as if it were a process of its own."""

        def on_output(output: RankOutput) -> None:
            self.seen += [f"{number}: {one.request}" for one in output.requests]
            for task in output.tasks:
                if task.kind is TaskKind.PREPARE and task.prepare and number not in self.busy:
                    rank.take(PrepareDone(task.prepare.epoch))

        service = RankService(number, incarnation, TIMING)
        rank = RankConnection(service, "127.0.0.1", self.port, on_output, tick_s=TICK_S)
        self.ranks[number], self.tasks[number] = rank, asyncio.create_task(rank.run())

    def stop_rank(self, number: int) -> None:
        """End a rank at once, as a signal would."""
        self.tasks.pop(number).cancel()

    def finish(self, number: int, request: str) -> None:
        """Let a rank complete a request."""
        incarnation = self.ranks[number].service.state.incarnation
        done = RequestDone(number, incarnation, request, "completed")
        assert self.ranks[number].send(encode_message(done))

    async def client(self) -> ControlClient:
        """Return a connected client."""
        client = ControlClient(self.done.append)
        await client.connect("127.0.0.1", self.port)
        return client

    async def until_shown(self, shown: str) -> None:
        """Wait until the engine is shown as `shown`."""
        client = await self.client()
        while (await self.status(client)).state != shown:
            await asyncio.sleep(TICK_S)
        await client.close()

    async def status(self, client: ControlClient) -> Answer:
        """Return the state of the engine."""
        return await client.ask(CommandKind.STATUS)


@asynccontextmanager
async def loopback(*replicas: int, start: bool = True) -> AsyncIterator[Loopback]:
    """Run a coordinator and its ranks; all is closed at the end, and the deadline is kept."""
    async with asyncio.timeout(HANG_S):
        server = CoordinatorServer(ControlService(replicas, TIMING), tick_s=TICK_S)
        network = Loopback(server, await server.start())
        try:
            if start:
                for rank in range(len(replicas)):
                    network.start_rank(rank)
                await network.until_shown("running")
            yield network
        finally:
            for task in network.tasks.values():
                task.cancel()
            await server.close()
