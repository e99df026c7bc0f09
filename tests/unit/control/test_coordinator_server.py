"""Tests of megatron.control.coordinator_server, on the loopback interface."""

import asyncio
import contextlib
import random

import pytest

from megatron.control import coordinator_server, frames
from megatron.control.frames import frame_of
from megatron.scheduling.control.messages import Command, encode_message
from megatron.scheduling.control.states import Code, CommandKind
from tests.support.inference.loopback import TIMING, loopback

K = CommandKind
pytestmark = pytest.mark.slow  # servers on the loopback interface
RANDOM_CONNECTIONS = 40


def test_an_engine_of_three_ranks_changes_its_state_and_answers_each_command() -> None:
    async def run() -> list[tuple[Code, str]]:
        async with loopback(0, 0, 1) as network:
            client = await network.client()
            answers = [
                await client.ask(kind, weights=3)
                for kind in (K.SUSPEND, K.PAUSE, K.SUSPEND, K.NEW_WEIGHTS, K.RESUME, K.STOP)
            ]
            return [(answer.code, answer.state) for answer in answers]

    assert asyncio.run(run()) == [
        (Code.WRONG_STATE, "running"),
        (Code.OK, "paused"),
        (Code.OK, "suspended"),
        (Code.OK, "suspended"),
        (Code.OK, "running"),
        (Code.OK, "stopped"),
    ]


def test_connections_with_random_bytes_are_closed_and_nobody_else_notices() -> None:
    async def run() -> None:
        async with loopback(0) as network:
            client = await network.client()
            await client.ask(K.SUBMIT, request="u")
            draw = random.Random(1)
            for _ in range(RANDOM_CONNECTIONS):
                reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
                data = draw.randbytes(draw.randrange(1, 60))
                writer.write(frame_of(data) if draw.random() < 0.5 else data)
                if draw.random() < 0.5:
                    writer.write_eof()
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
                writer.close()
            network.finish(0, "u")
            while not network.done:
                await network.status(client)
            assert [(one.request, one.status) for one in network.done] == [("u", "completed")]
            counts = network.server.service.counts
            assert counts["malformed"] > 0
            assert counts["broken_connections"] > 0

    asyncio.run(run())


def test_a_client_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_server, "MAX_BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(frames, "FRAME_S", 0.2)

    async def run() -> None:
        async with loopback(0) as network:
            _, writer = await asyncio.open_connection("127.0.0.1", network.port, limit=1)
            ask = frame_of(encode_message(Command("x" * 4000, K.STATUS)))
            while not network.server.service.counts["slow_readers"]:
                with contextlib.suppress(ConnectionError):
                    writer.write(ask * 100)
                    await asyncio.sleep(0.01)
            client = await network.client()
            assert (await network.status(client)).state == "running"

    asyncio.run(run())


def test_requests_of_a_rank_that_died_end_within_its_lease() -> None:
    async def run() -> float:
        async with loopback(0, 1) as network:
            client = await network.client()
            for name in ("u", "v"):
                assert (await client.ask(K.SUBMIT, request=name)).code is Code.ACCEPTED
            start = asyncio.get_running_loop().time()
            network.stop_rank(1)
            network.stop_rank(0)
            while len(network.done) < 2:
                await asyncio.sleep(0.01)
            assert {one.status for one in network.done} == {"failed"}
            assert (await client.ask(K.SUBMIT, request="w")).code is Code.NOT_READY
            return asyncio.get_running_loop().time() - start

    took_s = asyncio.run(run())
    assert took_s < TIMING.lease_ns / 1e9 + 5  # a busy machine is given five seconds


def test_an_engine_starts_every_time_whichever_rank_comes_first() -> None:
    async def run(order: tuple[int, ...]) -> None:
        async with loopback(0, 1, 2, start=False) as network:
            for rank in order:
                network.start_rank(rank)
                await asyncio.sleep(0)
            await network.until_shown("running")

    for _ in range(5):
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            asyncio.run(run(order))
