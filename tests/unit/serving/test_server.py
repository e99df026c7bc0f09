"""The official client, curl, signals, keys and ports, on a server that listens."""

import asyncio
import gc
import json
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from megatron import log
from megatron.errors import ConfigError
from megatron.inference.forward import SliceResult
from megatron.inference.sampling import SequenceDraw
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving import generation
from megatron.serving import server as server_module
from megatron.serving.engine.engine_thread import EngineThread
from megatron.serving.engine.model_engine import EngineSize, model_engine
from megatron.serving.engine_client import EngineStatus
from megatron.serving.server import (
    DrainTimeoutError,
    EngineLostError,
    TextServer,
    api_keys,
    check_exposure,
    control_keys,
    is_loopback,
    listen,
    serve,
)
from tests.support.models import tiny_build, tiny_config, tiny_model
from tests.support.serving.calls import backend_of, run
from tests.support.serving.fake_engine import FakeEngine
from tests.support.serving.live import LiveServer, live, post
from tests.support.serving.mixed_load import run_mixed_load
from tests.support.serving.models import CONTEXT, served_model
from tests.support.serving.tool_templates import MARKED

KEY = "a-key-of-some-length"


async def use_official_client(server: LiveServer, engine: FakeEngine) -> None:
    client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0)
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    whole = await client.completions.create(model="tiny", prompt="a", logprobs=1, seed=4)
    assert whole.choices[0].text == "Hello, world."
    assert whole.choices[0].logprobs.token_logprobs[0] == -0.5
    messages = [{"role": "user", "content": "Hi"}]
    parts = await client.chat.completions.create(
        model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in parts]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-2].choices[0].finish_reason) == ("Hello, world.", "stop")
    assert chunks[-1].usage.completion_tokens == 14
    vectors = await client.embeddings.create(model="tiny", input=["abc"])
    assert vectors.data[0].embedding == [3.0, 0.5]
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    engine.ends_after = (2, "failed")
    broken = await client.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="could not be computed"):
        _ = [chunk async for chunk in broken]
    stranger = openai.AsyncOpenAI(api_key="x" * 20, base_url=f"{server.url}/v1", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()
    await client.close()
    await stranger.close()


def test_the_official_client_works_unmodified() -> None:
    async def use() -> None:
        engine = FakeEngine()
        async with live(engine, keys=(KEY,)) as server:
            await use_official_client(server, engine)

    run(use())


async def curl(*words: str) -> str:
    program = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--max-time", "10", *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await program.communicate()
    return out.decode()


async def answers_over_http(server: LiveServer) -> list[str]:
    """By curl, where it is installed: an answer, a wrong key, a body that is too large."""
    url, json = f"{server.url}/v1/completions", "content-type: application/json"
    key = f"authorization: Bearer {KEY}"
    if shutil.which("curl") is None:
        sent = (
            post(b'{"prompt":"a"}', key),
            post(b'{"prompt":"a"}'),
            post(b"x" * 3000, key),
        )
        return [(await server.answer(data)).decode() for data in sent]
    return [
        await curl("--header", key, "--json", '{"prompt":"a"}', url),
        await curl("--header", json, "--data", '{"prompt":"a"}', url),
        await curl("--header", key, "--header", json, "--data", "x" * 3000, url),
    ]


def test_curl_gets_an_answer_and_errors() -> None:
    async def use() -> list[str]:
        async with live(FakeEngine(), keys=(KEY,), max_body_kib=1) as server:
            return await answers_over_http(server)

    answered, stranger, large = run(use())
    assert "Hello, world." in answered
    assert "invalid_api_key" in stranger
    assert "body_too_large" in large


def test_a_signal_lets_requests_finish_and_refuses_new_ones() -> None:
    engine = FakeEngine("x" * 40, delay_s=0.01)

    async def stop() -> tuple[bytes, bytes, bytes]:
        async with live(engine) as server:
            work = asyncio.ensure_future(server.answer(post(b'{"prompt":"a","max_tokens":40}')))
            while engine.generated < 3:
                await asyncio.sleep(0.005)
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.02)
            refused = await server.answer(post(b'{"prompt":"a"}'))
            health = await server.answer(
                b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            finished = await work
            await server.task
            return finished, refused, health

    finished, refused, health = run(stop())
    assert b"x" * 40 in finished
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"server_stopping" in refused
    assert health.startswith(b"HTTP/1.1 503 ")


def test_requests_that_do_not_end_in_time_get_an_error() -> None:
    engine = FakeEngine("x" * 40, delay_s=5.0)
    server = TextServer(backend_of(engine, drain_timeout=0), host="127.0.0.1")
    listener = listen("127.0.0.1", 0)
    answers: list[bytes] = []

    async def ask_and_stop() -> None:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(post(b'{"prompt":"a","stream":true}'))
        while not engine.requests:
            await asyncio.sleep(0.005)
        signal.raise_signal(signal.SIGTERM)
        answers.append(await reader.read())
        writer.close()

    server._on_start = lambda: tasks.append(asyncio.ensure_future(ask_and_stop()))
    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(DrainTimeoutError, match="before all requests had ended") as caught:
        serve(server, listener)
    assert caught.value.found == "1 requests after 0 seconds"
    assert b"server_stopping" in answers[0]
    assert b"[DONE]" not in answers[0]
    assert engine.running == 0


class Repeating:
    """An executor that draws the last token again."""

    def start(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Callable[[], Sequence[SliceResult]]:
        return lambda: [
            SliceResult(each.sequence, each.tokens[-1:] if each.samples else ())
            for each in plan.slices
        ]


def objects_of_a_server() -> Counter[str]:
    """Count the objects of ours and of the packages of the server, by type."""
    gc.collect()
    # asyncio keeps cancelled timers until there are more of them than of others.
    kinds = (
        type(each)
        for each in gc.get_objects()
        if not (type(each) is asyncio.TimerHandle and each.cancelled())
    )
    packages = ("megatron.", "uvicorn.", "starlette.", "h11.", "asyncio.", "_asyncio")
    return Counter(k.__qualname__ for k in kinds if str(k.__module__).startswith(packages))


async def after_processor_time(seconds: float, until: asyncio.Event) -> None:
    """Set an event when this process has computed for so long, however busy the machine is."""
    first = time.process_time()
    while time.process_time() - first < seconds:
        await asyncio.sleep(0.01)
    until.set()


async def objects_after_loads(server: LiveServer, rounds: int) -> list[Counter[str]]:
    found = []
    for seed in range(rounds):
        until = asyncio.Event()
        load = run_mixed_load(
            server.port, clients=8, until=until, seed=seed, context=CONTEXT, deadline_s=10
        )
        report, _ = await asyncio.gather(load, after_processor_time(0.5, until))
        assert report.of_end("completed") > 2 * OBJECTS_PER_CONNECTION
        await asyncio.sleep(0.1)  # connections of clients that left are closed
        found.append(objects_of_a_server())
    return found


OBJECTS_PER_CONNECTION = 10  # of one kind, of connections that are about to be closed


@pytest.mark.slow
def test_requests_leave_no_objects_behind() -> None:
    # Few blocks: entries of the prefix cache are objects that stay.
    limits = SchedulerLimits(
        blocks=8, block_size=32, max_length=CONTEXT, vocab_size=257, max_queued=64
    )
    engine = EngineThread(Repeating(), limits)
    engine.start()

    async def use() -> list[Counter[str]]:
        async with live(engine) as server:
            return await objects_after_loads(server, rounds=3)

    try:
        _, before, after = run(use())
    finally:
        assert engine.stop()
    grown = {kind: n for kind, n in (after - before).items() if n > OBJECTS_PER_CONNECTION}
    assert grown == {}


def test_a_port_in_use_is_named_with_a_way_out() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="the port is in use") as caught:
            listen("127.0.0.1", port)
        assert f"--port {port}" in str(caught.value.found)
        assert "or 0 for any free one" in caught.value.fix


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70000), ("a b", 1)])
def test_an_address_that_is_not_here_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen there") as caught:
        listen(host, port)
    assert f"--host {host} --port {port}" in str(caught.value.found)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],  # noqa: S104
)
def test_addresses_of_this_machine_are_known(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
    if expected:
        check_exposure(host, ())
    else:
        check_exposure(host, (KEY,))
        with pytest.raises(ConfigError, match="other machines could use the server"):
            check_exposure(host, ())


def test_keys_come_from_a_file_and_the_environment_and_are_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_API_KEY", raising=False)
    assert api_keys(None) == ()
    (tmp_path / "keys").write_text("\nfile-key-number-one\n  file-key-number-two  \n")
    monkeypatch.setenv("MEGATRON_API_KEY", "key-of-the-environment")
    found = api_keys(tmp_path / "keys")
    assert found == ("key-of-the-environment", "file-key-number-one", "file-key-number-two")
    assert log.masked(" ".join(found)) == "(redacted) (redacted) (redacted)"
    of_operators = tmp_path / "operators"
    of_operators.write_text("key-of-the-operators\n")
    assert control_keys(None) == ()
    assert control_keys(of_operators) == ("key-of-the-operators",)
    assert log.masked("key-of-the-operators") == "(redacted)"


@pytest.mark.parametrize(
    ("text", "found"), [("", "no keys"), ("short\n", "one of 5 characters"), ("a b" * 9, "of 27")]
)
def test_a_key_that_is_easy_to_guess_is_refused_without_being_shown(
    tmp_path: Path, text: str, found: str
) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="too easy to guess") as caught:
        api_keys(tmp_path / "keys")
    assert found in str(caught.value.found)
    assert not text or text.strip() not in str(caught.value)


def test_a_short_key_of_the_environment_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_API_KEY", "")
    with pytest.raises(ConfigError, match="too easy to guess") as caught:
        api_keys(None)
    assert caught.value.found == "MEGATRON_API_KEY: one of 0 characters"


def test_a_file_of_keys_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file of API keys cannot be read"):
        api_keys(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        control_keys(tmp_path / "none")
    assert str(caught.value.found).startswith("--control-key-file ")


def test_a_server_whose_engine_was_stopped_ends_as_after_a_signal() -> None:
    engine = FakeEngine()
    listener = listen("127.0.0.1", 0)
    server = TextServer(backend_of(engine), host="127.0.0.1", ends_with_engine=True)

    def stop() -> None:
        engine.state = EngineStatus(state="stopped", is_alive=False)

    server._on_start = stop
    serve(server, listener)
    assert server.engine_failure is None


def test_a_listener_is_bound_before_the_server_starts() -> None:
    with listen("localhost", 0) as listener:
        assert socket.create_connection(listener.getsockname()[:2], timeout=5).close() is None


def test_a_server_of_several_ranks_ends_with_its_engine_when_clients_have_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "_LOOK_S", 0.05)
    monkeypatch.setattr(server_module, "_FLUSH_S", 0.2)
    engine, answers = FakeEngine(), []
    engine.is_silent = True
    listener = listen("127.0.0.1", 0)
    server = TextServer(backend_of(engine), host="127.0.0.1", ends_with_engine=True)

    async def ask_and_lose_engine() -> None:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(post(b'{"prompt":"a"}'))
        while not engine.requests:
            await asyncio.sleep(0.005)
        engine.state = EngineStatus(state="failed", is_alive=False, detail="rank 1 is lost")
        answers.append(await reader.read())
        writer.close()

    server._on_start = lambda: tasks.append(asyncio.ensure_future(ask_and_lose_engine()))
    tasks: list[asyncio.Task[None]] = []
    with pytest.raises(EngineLostError, match="the engine no longer works") as caught:
        serve(server, listener)
    assert caught.value.found == "rank 1 is lost"
    assert b" 503 " in answers[0]
    assert b"rank 1 is lost" in answers[0]
    assert "the engine no longer works: rank 1 is lost" in capsys.readouterr().err


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}, "snow": {"type": "boolean"}},
            "required": ["city", "snow"],
            "additionalProperties": False,
        },
    },
}
QUESTION: Any = {"role": "user", "content": "Snow?"}
NO_SPACE = {str(ord(space)): -100 for space in " \n\t\r"}  # of which JSON may have any number
ROOM = 1200


async def streamed_call(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, str, Any]:
    """Return content, name, arguments and finish reason of a streamed answer."""
    content, name, arguments, finish = "", "", "", None
    stream = await client.chat.completions.create(
        model="tiny", messages=[QUESTION], tools=[WEATHER], stream=True, **fields
    )
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                assert call.index == 0
                assert call.id is None or call.id.startswith("call_")
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return content, name, arguments, finish


async def call_tools(server: LiveServer) -> None:
    """Let a model of random weights call a tool, as its grammar makes it, and answer the result."""
    client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0)
    draws: Any = {"seed": 3, "temperature": 2, "logit_bias": NO_SPACE, "max_tokens": 300}
    whole = await client.chat.completions.create(
        model="tiny",
        messages=[QUESTION],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        **draws,
    )
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (made,) = choice.message.tool_calls
    assert made.function.name == "weather"
    assert set(json.loads(made.function.arguments)) == {"city", "snow"}
    named = {"type": "function", "function": {"name": "weather"}}
    content, name, arguments, finish = await streamed_call(client, tool_choice=named, **draws)
    assert (content, name, finish) == ("", "weather", "tool_calls")
    assert arguments == made.function.arguments, "equal draws under an equal grammar"
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "No."}
    asked: Any = [QUESTION, choice.message.model_dump(exclude_none=True), result]
    after = await client.chat.completions.create(
        model="tiny", messages=asked, tools=[WEATHER], max_tokens=3, seed=1
    )
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="tools beside what an answer has to match"):
        await client.chat.completions.create(
            model="tiny",
            messages=[QUESTION],
            tools=[WEATHER],
            response_format={"type": "json_object"},
        )
    await client.close()


def test_the_official_client_calls_tools_whose_arguments_match_their_schema() -> None:
    served = served_model(template=MARKED, context_length=ROOM)
    config = tiny_config(max_position_embeddings=ROOM)
    model = tiny_model(config, tiny_build(vocab=VocabSize(257, 264), seq_length=ROOM))
    size = EngineSize(sequences=2, length=ROOM)
    engine = model_engine(model, ParallelContext.single(), size, max_queued=4, rules=served.rules)
    assert isinstance(engine, EngineThread)
    engine.start()

    async def use() -> None:
        async with live(engine, model=served) as server:
            await call_tools(server)

    run(use())
    assert engine.stop()


def test_a_call_that_the_model_chooses_is_told_from_its_text() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": 1}}\n</tool_call>'

    async def use() -> None:
        served = served_model(template=MARKED, context_length=ROOM)
        async with live(FakeEngine(text), model=served) as server:
            client = openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0)
            expected = ("Let me see.", "weather", '{"city": 1}', "tool_calls")
            assert await streamed_call(client) == expected
            assert await streamed_call(client, logprobs=True) == expected
            none = await streamed_call(client, tool_choice="none")
            assert none == (text, "", "", "stop"), "without tools all of it is text"
            cut = await streamed_call(client, max_tokens=30)
            assert cut == (text[:30], "", "", "length")
            await client.close()

    run(use())
