"""Slow, silent and too many clients are let go, and hold nobody else up."""

import asyncio
import time

from tests.support.serving.calls import run
from tests.support.serving.fake_engine import FakeEngine
from tests.support.serving.live import live, post

HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def test_half_a_header_is_closed_at_its_deadline_also_the_second_one() -> None:
    async def slow() -> list[bytes]:
        async with live(FakeEngine(), header_timeout=1) as server:
            halves = (b"GET / HT", HEALTH + b"GET / HT", b"")
            return await asyncio.gather(*map(server.answer, halves))

    first, second, empty = run(slow())
    assert first.startswith(b"HTTP/1.1 408 ")
    assert second.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in second
    assert empty.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_come_is_refused() -> None:
    async def slow() -> bytes:
        async with live(FakeEngine(), body_timeout=1) as server:
            return await server.answer(post(b"{}").replace(b"length: 2", b"length: 9"))

    answer = run(slow())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"2 bytes in 1 seconds" in answer


def test_a_connection_without_a_request_is_closed() -> None:
    async def idle() -> bytes:
        async with live(FakeEngine(), idle_timeout=1) as server:
            return await server.answer(HEALTH)

    assert run(idle()).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_reads_nothing_is_dropped_and_its_request_ended() -> None:
    engine = FakeEngine("x" * 99)

    async def stop_reading() -> None:
        async with live(engine, client_timeout=1) as server:
            body = b'{"prompt":["' + b'","'.join([b"a"] * 100) + b'"],"n":8,"max_tokens":99'
            body += b',"logprobs":20,"stream":true}'
            reader, _ = await server.send(post(body))
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            while not engine.requests or server.server._admission.jobs:
                await asyncio.sleep(0.01)

    start = time.monotonic()
    run(stop_reading())
    assert time.monotonic() - start < 15


def test_connections_beyond_the_limit_are_closed_with_503() -> None:
    async def many() -> tuple[bytes, bytes]:
        async with live(FakeEngine(), max_connections=2, header_timeout=60) as server:
            held = [await server.send(b"GET") for _ in range(2)]
            refused = await server.answer(HEALTH)
            held[0][1].close()
            await held[0][1].wait_closed()
            await asyncio.sleep(0.05)
            reader, writer = await server.send(HEALTH)
            accepted = await reader.readline()
            for _, open_writer in [*held, (reader, writer)]:
                open_writer.close()
            return refused, accepted

    refused, accepted = run(many())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert accepted.startswith(b"HTTP/1.1 200 ")


def test_two_hundred_clients_are_answered_beside_a_slow_one() -> None:
    engine = FakeEngine(delay_s=0.5)

    async def crowd() -> tuple[list[bytes], bytes, int]:
        async with live(engine, max_requests=150, header_timeout=30) as server:
            _, slow = await server.send(b"POST /v1/completions HTTP/1.1\r\n")
            request = post(b'{"prompt":"a","stream":true}')
            work = [asyncio.ensure_future(server.answer(request)) for _ in range(200)]
            await asyncio.sleep(0.05)
            health = await server.answer(
                HEALTH.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost")
            )
            waiting = sum(not each.done() for each in work)
            engine.delay_s = 0.0
            answers = await asyncio.gather(*work)
            slow.close()
            return answers, health, waiting

    answers, health, waiting = run(crowd())
    statuses = [answer.split()[1] for answer in answers]
    assert statuses.count(b"200") >= 150
    assert statuses.count(b"200") + statuses.count(b"429") == 200
    assert all(b"[DONE]" in answer for answer in answers if b" 200 " in answer[:20])
    assert health.startswith(b"HTTP/1.1 200 ")
    assert waiting >= 150  # it does not wait for them
    assert engine.running == 0


def test_bytes_that_are_no_http_end_their_connection_alone() -> None:
    async def noise() -> list[bytes]:
        async with live(FakeEngine(), header_timeout=1, idle_timeout=1) as server:
            noises = (b"\x16\x03\x01" * 9, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99999)
            answers = await asyncio.gather(*map(server.answer, noises))
            return [*answers, await server.answer(post(b'{"prompt":"a"}'))]

    *refused, answered = run(noise())
    assert all(answer.startswith(b"HTTP/1.1 4") for answer in refused)
    assert b"Hello, world." in answered
