"""Every path of the server, answered by an engine without a model."""

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import log
from megatron.errors import MegatronError
from megatron.serving.app import server_app
from megatron.serving.bodies import ChatBody, CompletionBody
from megatron.serving.engine_client import EngineStatus
from tests.support.examples import examples
from tests.support.serving.calls import (
    Reply,
    app_of,
    ask,
    backend_of,
    call,
    run,
)
from tests.support.serving.fake_engine import (
    FULL,
    LOGPROB,
    PAUSED,
    REFUSED,
    FakeEngine,
)
from tests.support.serving.models import served_model

HELLO = "Hello, world."
CHAT = [{"role": "user", "content": "Hi"}]


def complete(engine: FakeEngine, body: dict[str, Any], **limits: Any) -> Reply:
    return ask(app_of(engine, **limits), "POST", "/v1/completions", body)


def chat(engine: FakeEngine, body: dict[str, Any], **limits: Any) -> Reply:
    return ask(app_of(engine, **limits), "POST", "/v1/chat/completions", {"messages": CHAT} | body)


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [each for event in events[:-1] for each in event["choices"]]
    return "".join(
        each.get("text", each.get("delta", {}).get("content", ""))
        for each in choices
        if each["index"] == index
    )


def test_a_completion_is_answered_with_its_text_and_its_counts() -> None:
    reply = complete(FakeEngine(), {"model": "tiny", "prompt": "ab", "max_tokens": 50})
    assert reply.status == 200
    (choice,) = reply.json["choices"]
    assert choice == {"index": 0, "text": HELLO, "finish_reason": "stop", "logprobs": None}
    assert reply.json["object"] == "text_completion"
    assert reply.json["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(HELLO) + 1,  # with the token that ends a text
        "total_tokens": len(HELLO) + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_are_the_default_and_fewer_where_the_model_ends() -> None:
    engine = FakeEngine("x" * 40)
    assert complete(engine, {"prompt": "ab"}).json["choices"][0] == {
        "index": 0,
        "text": "x" * 16,
        "finish_reason": "length",
        "logprobs": None,
    }
    assert len(complete(engine, {"prompt": "a" * 120}).json["choices"][0]["text"]) == 8


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(97, 98)]),
        (["a", "bc"], [(97,), (98, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("", [(256,)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, tokens: list[tuple[int, ...]]) -> None:
    engine = FakeEngine()
    reply = complete(engine, {"prompt": prompt, "n": 2})
    assert [request.prompt for request in engine.requests] == tokens
    assert [each["index"] for each in reply.json["choices"]] == list(range(2 * len(tokens)))


def test_how_tokens_are_drawn_reaches_the_engine() -> None:
    engine = FakeEngine()
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    given |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.2}
    complete(engine, {"prompt": "a", **given, "logit_bias": {"65": -100}, "min_tokens": 2})
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert request.sampling.logit_bias == {65: -100}
    assert (request.min_new_tokens, request.stop_tokens) == (2, {256})
    complete(engine, {"prompt": "a", "temperature": 0, "top_p": 0.5, "ignore_eos": True})
    assert engine.requests[1].sampling.greedy
    assert engine.requests[1].stop_tokens == frozenset()


def test_a_stop_string_ends_a_text_and_is_no_part_of_it() -> None:
    engine = FakeEngine()
    reply = complete(engine, {"prompt": "a", "stop": ["wor", "xyz"], "logprobs": 0})
    (choice,) = reply.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello, ", "stop")
    assert choice["logprobs"]["tokens"] == list("Hello, ")
    assert reply.json["usage"]["completion_tokens"] == len("Hello, wor")
    assert engine.ended_samples == [(engine.requests[0].id, 0)]


def test_logprobs_of_completions_have_their_shape() -> None:
    reply = complete(
        FakeEngine("\u00e9"), {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 3}
    )
    (choice,) = reply.json["choices"]
    assert choice["text"] == "ab\u00e9"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "<|endoftext|>"],
        "token_logprobs": [None, *[LOGPROB] * 4],
        "top_logprobs": [
            None,
            {"b": LOGPROB, "A": -66.0},
            {"bytes:\\xc3": LOGPROB, "A": -66.0},
            {"bytes:\\xa9": LOGPROB, "A": -66.0},
            {"<|endoftext|>": LOGPROB, "A": -66.0},
        ],
        "text_offset": [0, 1, 2, 2, 3],
    }


def test_a_prompt_is_scored_without_an_answer() -> None:
    reply = complete(FakeEngine(), {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0})
    (choice,) = reply.json["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, LOGPROB, LOGPROB]
    assert reply.json["usage"]["completion_tokens"] == 0
    body = {"prompt": "a" * 128, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert complete(FakeEngine(), body).status == 200  # no room for an answer is needed


def test_a_stream_ends_with_a_reason_its_counts_and_done() -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    reply = complete(FakeEngine(), body | {"n": 2})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = reply.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * (len(HELLO) + 1)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [text_of(reply.events, index) for index in range(2)] == [HELLO, HELLO]
    assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == ["stop", "stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_a_chat_is_written_by_the_template_and_ends_where_it_says() -> None:
    engine = FakeEngine("Fine.<|im_end|>\n")
    reply = chat(engine, {"logprobs": True, "top_logprobs": 1})
    (choice,) = reply.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Fine.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"][0] == {
        "token": "F",
        "logprob": LOGPROB,
        "bytes": [70],
        "top_logprobs": [{"token": "A", "logprob": -66.0, "bytes": [65]}],
    }
    prompt = bytes(engine.requests[0].prompt).decode()
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_streams_its_role_its_text_and_its_end() -> None:
    events = chat(FakeEngine(), {"stream": True}).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["object"] == "chat.completion.chunk"
    assert text_of(events) == HELLO
    last = events[-2]["choices"][0]
    assert (last["delta"], last["finish_reason"], events[-1]) == ({}, "stop", "[DONE]")


def test_the_parts_of_a_message_and_the_newer_role_are_understood() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    assert chat(engine, {"messages": messages}).status == 200
    prompt = bytes(engine.requests[0].prompt).decode()
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\na\nb<|im")


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"prompt": []}, 400, "prompt", "found: an empty list"),
        ({"prompt": ["a", 1]}, 400, "prompt", "a mixture of forms"),
        ({"prompt": [300]}, 400, "prompt", "does not have; found: 300; fix: use ids from 0 to 256"),
        ({"prompt": ["a"] * 129}, 400, "prompt", "found: 129 prompts"),
        ({"prompt": "a" * 200}, 400, "prompt", "shorten the prompt"),
        ({"prompt": "abc", "max_tokens": 126}, 400, "max_tokens", "ask for 125 new tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "or echo to score a prompt"),
        ({"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, 400, "n", "all answers are equal"),
        ({"prompt": "a", "n": 9}, 400, "n", "use 8 or fewer"),
        ({"prompt": "a", "temperature": 101}, 400, "temperature", "use 100 or less"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p", "use a number above 0"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "use 20 or fewer"),
        ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "use 16 or fewer"),
        ({"prompt": "a", "stop": ""}, 400, "stop", "a string of 0 characters"),
        ({"prompt": "a", "stop_token_ids": [257]}, 400, "stop_token_ids", "found: 257"),
        ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "use 16 or fewer"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "use token ids as names"),
        ({"prompt": "a", "logit_bias": {"257": 1}}, 400, "logit_bias", "found: 257"),
        ({"prompt": "a", "model": "other"}, 404, "model", "fix: use tiny"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of", "leave best_of out"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_what_can(
    body: dict[str, Any], status: int, param: str, message: str
) -> None:
    engine = FakeEngine()
    reply = complete(engine, body)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert message in reply.error["message"]
    assert not engine.requests


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "send 1 to 1024 messages"),
        ({"messages": [{"role": "x", "content": "x"}]}, "messages[0].role", "found: 'x'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "send a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "a message may have text only",
        ),
        (
            {"messages": [{"role": "user", "content": "<|im_end|>"}]},
            "messages",
            "holds what the template chatml writes itself",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "set logprobs to true as well"),
        ({"max_tokens": 0}, "max_tokens", "use 1 or more"),
        ({"tools": [{"type": "web"}]}, "tools[0]", "found: no function"),
        ({"tools": TOOLS}, "tools", "the chat template chatml does not write tools"),
        ({"functions": [{"name": "f"}]}, "functions", "leave functions out"),
        ({"guided_grammar": "a" * 65537}, "guided_grammar", "found: 65537 bytes"),
        ({"response_format": {"type": "xml"}}, "response_format", "found: type 'xml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "found: no json_schema.schema",
        ),
        (
            {"guided_json": {"properties": {"a": {"typ": 1}}}},
            "guided_json",
            "found: 'typ' at $.properties.a",
        ),
        ({"guided_json": "{"}, "guided_json", "the body is not JSON"),
        ({"guided_json": '{"not":' * 40 + "{}" + "}" * 40}, "guided_json", "levels"),
        ({"guided_regex": "a" * 65537}, "guided_regex", "found: 65537 bytes"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "say in one way"),
        (
            {"structured_outputs": {"tag": "x"}},
            "structured_outputs",
            "found: tag",
        ),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "send a text"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "send a list of texts"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(
    body: dict[str, Any], param: str, message: str
) -> None:
    reply = chat(FakeEngine(), body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert message in reply.error["message"]


def test_a_model_without_a_template_has_no_chats() -> None:
    reply = chat(FakeEngine(), {}, model=served_model(template=None))
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert "use /v1/completions" in reply.error["message"]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (FULL, 429, "queue_full", "5"),
        (PAUSED, 503, "engine_unavailable", "5"),
        (REFUSED, 400, "invalid_value", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_a_status_of_its_own(
    error: MegatronError, status: int, code: str, retry: str | None, stream: bool
) -> None:
    engine = FakeEngine()
    engine.error = error
    reply = complete(engine, {"prompt": "a", "stream": stream})
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers.get("retry-after") == retry
    assert error.problem in reply.json["message"]


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("failed", 500, "internal"),
        ("expired", 504, "deadline_exceeded"),
        ("aborted", 503, "engine_unavailable"),
    ],
)
def test_a_request_that_ends_early_says_so(end: Any, status: int, code: str) -> None:
    engine = FakeEngine()
    engine.ends_after = (3, end)
    reply = complete(engine, {"prompt": "a"})
    assert (reply.status, reply.error["code"]) == (status, code)
    events = complete(engine, {"prompt": "a", "stream": True}).events
    assert text_of(events) == HELLO[:3]
    assert events[-1]["error"]["code"] == code  # and no [DONE]


def test_a_job_whose_engine_dies_ends() -> None:
    engine = FakeEngine()
    engine.is_silent = True
    engine.state = EngineStatus(state="failed", is_alive=False, detail="a step took 30 s")
    reply = complete(engine, {"prompt": "a"})
    assert (reply.status, reply.error["code"]) == (503, "engine_unavailable")
    assert "a step took 30 s" in reply.error["message"]
    assert engine.running == 0


def test_a_client_that_leaves_ends_its_request() -> None:
    for stream in (True, False):
        engine = FakeEngine("x" * 100, delay_s=0.002)

        async def leave(engine: FakeEngine = engine, stream: bool = stream) -> None:
            app, left = app_of(engine), asyncio.Event()
            body = {"prompt": "a", "max_tokens": 100, "stream": stream}

            async def receive() -> dict[str, Any]:
                if not engine.requests:
                    data = json.dumps(body).encode()
                    return {"type": "http.request", "body": data, "more_body": False}
                await left.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                pass

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "root_path": ""}
            scope |= {"query_string": b"", "headers": headers, "http_version": "1.1"}
            task = asyncio.ensure_future(app(scope, receive, send))
            while engine.generated < 5:
                await asyncio.sleep(0.001)
            left.set()
            await task

        run(leave())
        assert engine.running == 0
        assert engine.aborted == [engine.requests[0].id]
        assert engine.generated < 50


def test_prompts_beyond_the_limit_get_429_and_the_place_is_free_again() -> None:
    engine = FakeEngine("x" * 100, delay_s=0.001)

    async def two() -> list[Reply]:
        app = app_of(engine, max_requests=1)
        body = {"prompt": "a", "max_tokens": 20}
        both = await asyncio.gather(*(call(app, "POST", "/v1/completions", body) for _ in "ab"))
        return [*both, await call(app, "POST", "/v1/completions", body)]

    first, second, later = run(two())
    assert [first.status, second.status, later.status] == [200, 429, 200]
    assert (second.error["code"], second.headers["retry-after"]) == ("queue_full", "1")
    assert "1 of 1, and 1 more" in second.error["message"]


def test_the_second_prompt_that_is_refused_ends_the_first() -> None:
    engine = FakeEngine(delay_s=5.0)
    submit = engine.submit

    def refuse_second(request: Any, deliver: Any) -> None:
        if engine.requests:
            engine.error = FULL
        submit(request, deliver)

    engine.submit = refuse_second  # type: ignore[method-assign]
    assert complete(engine, {"prompt": ["a", "b"]}).status == 429
    assert engine.aborted == [engine.requests[0].id]


def test_fields_without_effect_are_named_in_a_header_or_refused() -> None:
    body = {"prompt": "a", "user": "me", "x\n": 1}
    reply = complete(FakeEngine(), body)
    assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "user")
    strict = ask(
        server_app(backend_of(FakeEngine()), is_strict=True), "POST", "/v1/completions", body
    )
    assert (strict.status, strict.error["code"], strict.error["param"]) == (
        400,
        "unknown_parameter",
        "user",
    )
    assert "without --strict-api" in strict.error["message"]


def test_megatrons_interface_answers_with_text_segments_and_tokens() -> None:
    app = app_of(FakeEngine())
    reply = ask(app, "PUT", "/api", {"prompts": ["ab", "c"], "tokens_to_generate": 4})
    assert reply.json == {
        "text": ["abHell", "cHell"],
        "segments": [list("abHell"), list("cHell")],
        "tokens": [list(b"abHell"), list(b"cHell")],
    }
    body = {"prompts": ["ab"], "tokens_to_generate": 0, "logprobs": True}
    scored = ask(app, "PUT", "/api", body).json
    assert (scored["text"], scored["logprobs"]) == (["ab"], [[LOGPROB]])
    body = {"prompts": ["ab"], "tokens_to_generate": 2, "logprobs": True, "add_BOS": True}
    scored = ask(app, "PUT", "/api", body).json
    assert scored["tokens"] == [[256, *b"abHe"]]
    assert len(scored["logprobs"][0]) == 4
    body = {"prompts": ["ab"], "stop_on_eol": True}
    assert ask(app_of(FakeEngine("x\ny")), "PUT", "/api", body).json["text"] == ["abx"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompts": []}, "an empty list"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "or logprobs to score a prompt"),
        ({"prompts": ["a"], "top_k": 2, "top_p": 0.5}, "use top_k or top_p, not both"),
        ({"prompts": ["a"], "beam_width": 3}, "leave beam_width out"),
        ({"prompts": ["a"], "temperature": 0}, "fix: send `float` > 0.0"),
    ],
)
def test_megatrons_errors_have_a_status_and_a_message(body: Any, message: str) -> None:
    reply = ask(app_of(FakeEngine()), "PUT", "/api", body)
    assert reply.status == 400
    assert message in reply.json["message"]


def test_embeddings_are_numbers_or_what_the_official_client_asks_for() -> None:
    app = app_of(FakeEngine())
    reply = ask(app, "POST", "/v1/embeddings", {"input": ["abc", "d"]})
    assert [each["embedding"] for each in reply.json["data"]] == [[3.0, 0.5], [1.0, 0.5]]
    assert reply.json["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    packed = ask(app, "POST", "/v1/embeddings", {"input": "abc", "encoding_format": "base64"})
    data = base64.b64decode(packed.json["data"][0]["embedding"])
    assert struct.unpack("<2f", data) == (3.0, 0.5)
    wrong = ask(app, "POST", "/v1/embeddings", {"input": "abc", "encoding_format": "hex"})
    assert "use float or base64" in wrong.error["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": "a" * 129}, 400, "longer than the 128 tokens"),
        ({"input": ["a", [1]]}, 400, "a mixture of forms"),
        ({"input": "a", "model": "other"}, 404, "use tiny"),
        ({"input": "a", "dimensions": 8}, 400, "leave dimensions out"),
    ],
)
def test_a_text_that_cannot_be_embedded_is_refused(
    body: dict[str, Any], status: int, message: str
) -> None:
    reply = ask(app_of(FakeEngine()), "POST", "/v1/embeddings", body)
    assert (reply.status, message in reply.error["message"]) == (status, True)


def test_embeddings_wait_and_end_as_other_requests_do() -> None:
    engine = FakeEngine()
    forms: list[Any] = ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]]
    for form in forms:
        assert ask(app_of(engine), "POST", "/v1/embeddings", {"input": form}).status == 200
    assert [each.prompt for each in engine.requests] == [(97, 98), (97, 98), (99,)] * 2
    assert {(each.max_new_tokens, each.embeds) for each in engine.requests} == {(0, True)}
    assert engine.requests[0].deadline_ns is not None
    busy = app_of(FakeEngine(), max_requests=1)
    assert ask(busy, "POST", "/v1/embeddings", {"input": ["a", "b"]}).status == 429
    engine.error = PAUSED
    assert ask(app_of(engine), "POST", "/v1/embeddings", {"input": "a"}).status == 503


def test_the_model_is_listed() -> None:
    app = app_of(FakeEngine())
    (entry,) = ask(app, "GET", "/v1/models").json["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", 128)
    assert ask(app, "GET", "/v1/models/tiny").json == entry
    missing = ask(app, "GET", "/v1/models/org/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_text_and_tokens_are_turned_into_each_other() -> None:
    app = app_of(FakeEngine())
    tokens = ask(app, "POST", "/tokenize", {"prompt": "\u00e9"}).json
    assert tokens == {"tokens": [0xC3, 0xA9], "count": 2, "max_model_len": 128}
    assert ask(app, "POST", "/detokenize", {"tokens": [0xC3, 0xA9]}).json == {"prompt": "\u00e9"}
    rendered = ask(app, "POST", "/tokenize", {"messages": CHAT}).json
    assert rendered["prompt"].endswith("<|im_start|>assistant\n")
    for wrong in ({}, {"prompt": "a", "messages": CHAT}):
        assert "send prompt or messages" in ask(app, "POST", "/tokenize", wrong).error["message"]


def test_health_knows_whether_the_engine_lives() -> None:
    engine = FakeEngine()
    backend = backend_of(engine)
    app = server_app(backend)
    assert ask(app, "GET", "/health").status == 200
    engine.state = EngineStatus(state="running", is_alive=False, detail="a step takes 31 s")
    dead = ask(app, "GET", "/health")
    assert (dead.status, dead.json["status"]) == (503, "unavailable")
    assert dead.json["engine"]["detail"] == "a step takes 31 s"
    engine.state = EngineStatus(state="loading")
    assert ask(app, "GET", "/health").status == 503
    engine.state = EngineStatus(state="paused", takes_requests=False)
    assert ask(app, "GET", "/health").status == 200
    backend.admission.is_draining = True
    assert ask(app, "GET", "/health").json["status"] == "stopping"


def test_metrics_and_state_show_what_was_done() -> None:
    engine = FakeEngine()

    async def use() -> tuple[Reply, Reply]:
        app = app_of(engine, max_requests=1)
        await call(app, "POST", "/v1/completions", {"prompt": "ab"})
        await call(app, "POST", "/v1/completions", {"prompt": ["ab", "c"]})
        return await call(app, "GET", "/metrics"), await call(app, "GET", "/state")

    metrics, state = run(use())
    lines = metrics.body.decode().splitlines()
    count = len(HELLO) + 1
    for line in (
        'megatron_request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'megatron_admission_rejections_total{model_name="tiny",reason="queue_full"} 1.0',
        f'megatron_generation_tokens_total{{model_name="tiny"}} {count}.0',
        'megatron_time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        f'megatron_inter_token_latency_seconds_count{{model_name="tiny"}} {count - 1}.0',
        'megatron_request_prompt_tokens_sum{model_name="tiny"} 2.0',
        'megatron_num_requests_running{model_name="tiny"} 0.0',
        'megatron_spec_decode_num_drafts_total{model_name="tiny"} 0.0',
        'megatron_spec_decode_num_draft_tokens_total{model_name="tiny"} 0.0',
        'megatron_spec_decode_num_accepted_tokens_total{model_name="tiny"} 0.0',
        'megatron_engine_state{state="running"} 1.0',
    ):
        assert line in lines
    assert state.json["chat_template"] == "chatml"
    assert state.json["engine"]["generated_tokens"] == count


def test_a_path_or_method_that_is_not_there_has_an_error_in_the_same_form() -> None:
    app = app_of(FakeEngine())
    assert ask(app, "GET", "/v2").error["code"] == "not_found"
    wrong = ask(app, "GET", "/v1/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")


def test_a_bug_is_answered_without_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.submit = None  # type: ignore[assignment]
    log.hide(["hidden-secret"])
    reply = complete(engine, {"prompt": "hidden-secret"})
    assert (reply.status, reply.error["code"]) == (500, "internal")
    assert reply.headers["x-should-retry"] == "false"
    assert "found: TypeError" in reply.error["message"]
    assert "Traceback" not in reply.body.decode()
    assert "Traceback" in capsys.readouterr().err


def test_a_large_prompt_is_answered_too() -> None:
    body = {"prompt": ["a" * 100] * 100, "user": "x" * (1 << 16), "max_tokens": 1}
    reply = complete(FakeEngine(), body)
    assert (reply.status, len(reply.json["choices"])) == (200, 100)
    no_number = {"content-length": "many"}
    app = app_of(FakeEngine())
    assert ask(app, "POST", "/v1/completions", {"prompt": "a"}, headers=no_number).status == 200


def test_a_quiet_stream_gets_comments() -> None:
    engine = FakeEngine("ab", delay_s=1.2)
    reply = complete(
        engine, {"prompt": "a", "stream": True, "max_tokens": 1}, keep_alive_interval=1
    )
    assert reply.body.startswith(b": keep-alive\n\n: keep-alive\n\ndata: ")


TEXTS = st.text(max_size=20) | st.sampled_from(["\U0001f642 \u65e5\u672c", "a\u0301\u00df"])


@examples(120)
@given(TEXTS, st.lists(st.text(alphabet="abH\u65e5 ", min_size=1, max_size=3), max_size=2))
def test_streamed_text_is_the_text_at_once(text: str, stops: list[str]) -> None:
    body = {"prompt": "a", "max_tokens": 100, "stop": stops}
    whole = complete(FakeEngine(text), body).json["choices"][0]
    events = complete(FakeEngine(text), body | {"stream": True}).events
    assert text_of(events) == whole["text"]
    assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    end = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    assert whole["text"] == text[:end] or len(stops) == 2


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
BODIES = [
    ("POST", "/v1/completions", CompletionBody, {"prompt": "a"}),
    ("POST", "/v1/chat/completions", ChatBody, {"messages": CHAT}),
]


def test_no_body_breaks_the_server() -> None:
    app = app_of(FakeEngine("x"))

    @examples(240)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        method, path, kind, needed = data.draw(st.sampled_from(BODIES))
        names = st.sampled_from(kind.__struct_fields__)
        fields = needed | data.draw(st.dictionaries(names, JSON, max_size=3))
        reply = ask(app, method, path, fields)
        assert reply.status in (200, 400, 404), reply.body
        assert reply.is_complete

    check()


@examples(60)
@given(st.binary(max_size=60))
def test_no_bytes_break_the_server(data: bytes) -> None:
    reply = ask(app_of(FakeEngine("x")), "POST", "/v1/completions", data)
    assert reply.status == 400
