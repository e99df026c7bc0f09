"""Tests of megatron.control.rank_connection, on the loopback interface."""

import asyncio

import pytest

from megatron.control.rank_connection import RankConnection
from megatron.scheduling.control.member import EngineTask, JoinRequest, TaskKind
from megatron.scheduling.control.rank_service import RankOutput, RankService
from megatron.scheduling.control.states import Code, CommandKind
from megatron.scheduling.control.timing import ControlTiming
from tests.support.inference.loopback import TICK_S, loopback

K = CommandKind
pytestmark = pytest.mark.slow  # servers on the loopback interface


def test_a_connection_that_breaks_is_made_again_and_the_rank_stays_a_member() -> None:
    async def run() -> None:
        async with loopback(0, 1) as network:
            client = await network.client()
            writer = network.ranks[0]._writer
            assert writer is not None
            writer.transport.abort()
            while network.ranks[0]._writer in (None, writer):
                await asyncio.sleep(TICK_S)
            answer = await client.ask(K.PAUSE)
            assert answer.code is Code.OK
            assert [one.verdict for one in answer.ranks] == ["ack", "ack"]
            assert network.server.service.state.incarnations == (1, 1)
            assert network.server.service.counts["lost"] == 0

    asyncio.run(run())


def test_a_rank_that_comes_later_than_the_coordinators_first_try_joins() -> None:
    async def run() -> None:
        async with loopback(0, 1, start=False) as network:
            network.start_rank(0)
            client = await network.client()
            while (await network.status(client)).detail != "ranks 1 are missing":
                await asyncio.sleep(TICK_S)
            network.start_rank(1)
            await network.until_shown("running")

    asyncio.run(run())


def test_a_rank_without_a_coordinator_sends_nothing_and_goes_on_trying() -> None:
    async def run() -> None:
        async with loopback(0) as network:
            port = network.port
            await network.server.close()
            rank = network.ranks[0]
            while rank._writer is not None:
                await asyncio.sleep(TICK_S)
            assert not rank.send(b"lost")
            while rank.service.state.admits:
                await asyncio.sleep(TICK_S)
            assert not network.tasks[0].done()
            assert port == network.port

    asyncio.run(run())


def test_a_rank_that_was_killed_and_started_again_serves_again() -> None:
    async def run() -> None:
        async with loopback(0) as network:
            client = await network.client()
            network.stop_rank(0)
            await asyncio.sleep(TICK_S)
            network.start_rank(0, incarnation=100)
            while network.server.service.state.incarnations != (100,):
                await asyncio.sleep(TICK_S)
            await network.until_shown("running")
            assert (await client.ask(K.SUBMIT, request="u")).code is Code.ACCEPTED
            while network.seen != ["0: u"]:
                await asyncio.sleep(TICK_S)

    asyncio.run(run())


def test_an_engine_has_a_task_before_the_coordinator_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, order = RankService(0, 1, ControlTiming()), list[str]()
    output = RankOutput((b"acknowledged",), (EngineTask(TaskKind.RESET),))
    monkeypatch.setattr(service, "take", lambda event: output)
    connection = RankConnection(service, "", 0, lambda output: order.append("task"))
    monkeypatch.setattr(connection, "send", lambda data: order.append("message"))
    connection.take(JoinRequest())
    assert order == ["task", "message"]
