"""Tests of megatron.control.client, on the loopback interface."""

import asyncio

import pytest

from megatron.control.client import (
    ControlClient,
    ControlConnectionError,
    ControlTimeoutError,
)
from megatron.scheduling.control.states import Code, CommandKind
from tests.support.inference.loopback import TICK_S, loopback

K = CommandKind
pytestmark = pytest.mark.slow  # servers on the loopback interface


def test_a_command_without_an_answer_ends_in_its_time_and_can_be_asked_for_again() -> None:
    async def run() -> None:
        async with loopback(0, 1) as network:
            client = await network.client()
            network.busy = {1}
            with pytest.raises(ControlTimeoutError, match="has not answered pause") as late:
                await client.ask(K.PAUSE, wait_s=0.05, name="p")
            assert "with the id p" in late.value.fix
            answer = await client.ask(K.PAUSE, name="p")  # the same one, not another
            assert (answer.code, answer.detail) == (Code.TIMEOUT, "rank 1: silent")
            assert network.server.service.state.epoch == 2

    asyncio.run(run())


def test_an_answer_that_is_waited_for_is_an_error_when_the_connection_breaks() -> None:
    async def run() -> None:
        async with loopback(0) as network:
            client = await network.client()
            network.busy = {0}
            asking = asyncio.create_task(client.ask(K.PAUSE))
            while network.server.service.state.shown != "pausing":
                await asyncio.sleep(TICK_S)
            await network.server.close()
            with pytest.raises(ControlConnectionError, match="no connection to the coordinator"):
                await asking
            with pytest.raises(ControlConnectionError, match="no connection to the coordinator"):
                await client.ask(K.STATUS)

    asyncio.run(run())


def test_a_coordinator_that_is_not_there_is_an_error() -> None:
    async def run() -> None:
        async with loopback(0, start=False) as network:
            port = network.port
            await network.server.close()
        client = ControlClient(network.done.append)
        with pytest.raises(ControlConnectionError, match="no connection to the coordinator") as no:
            await client.connect("127.0.0.1", port)
        assert f"127.0.0.1:{port}" in str(no.value.found)

    asyncio.run(run())


def test_requests_of_a_client_that_closes_are_aborted_and_others_go_on() -> None:
    async def run() -> None:
        async with loopback(0) as network:
            first, second = await network.client(), await network.client()
            await first.ask(K.SUBMIT, request="u")
            await first.close()
            while network.seen != ["0: u", "0: u"]:  # its start and its abort
                await asyncio.sleep(TICK_S)
            for number in range(10):
                answer = await second.ask(K.SUBMIT, request=f"v{number}")
                assert answer.code is Code.ACCEPTED
                network.finish(0, f"v{number}")
            while len(network.done) < 10:
                await asyncio.sleep(TICK_S)

    asyncio.run(run())
