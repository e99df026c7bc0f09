"""Bodies are read strictly: a wrong value is an error that names its field."""

import gc
import json
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.json_values import JsonObject
from megatron.serving.api_errors import ApiError
from megatron.serving.bodies import (
    ChatBody,
    CompletionBody,
    MegatronBody,
    json_object,
    read_fields,
    unsupported_fields,
)
from tests.support.examples import examples

MIB = 1 << 20
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def error_of(data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        json_object(data, max_depth=32)
    return caught.value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is not JSON; found: Input data was truncated"),
        (b'{"a": NaN}', "the body is not JSON"),
        (b'{"a": 1e999}', "Number out of range"),
        (b'{"a": "\xff"}', "can't decode byte"),
        (b'{"a": "\\ud800"}', "the body is not JSON"),
        (b"[1]", "not a JSON object; found: a JSON list"),
        (b"[" * 33, "too deep in each other; found: 33 levels; fix: send at most 32"),
        (b'{"a":' * MIB, "too deep in each other"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data: bytes, message: str) -> None:
    error = error_of(data)
    assert message in error.message
    assert (error.status, error.code) == (400, "invalid_json")


def seconds_of(data: bytes) -> float:
    """Return the least CPU time of three that a body takes; collections of garbage left out.

    Those depend on what else the process holds.
    """
    took = []
    gc.disable()
    try:
        for _ in range(3):
            start = time.process_time()
            with suppress(ApiError):
                json_object(data, max_depth=32)
            took.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(took)


@pytest.mark.parametrize(
    ("start", "part", "end"),
    [(b'{"a":[', b"[],", b"1]}"), (b'"', b'\\"', b""), (b"", b'"",', b"")],
    ids=["lists", "an open string", "strings"],
)
def test_the_time_of_a_body_grows_with_its_length(start: bytes, part: bytes, end: bytes) -> None:
    few, many = (
        seconds_of(start + part * (size // len(part)) + end) for size in (MIB // 512, MIB // 32)
    )
    assert few > 0
    assert many / few < 64, "16 times the bytes: 16 times the time, or 256 if it were quadratic"


def test_brackets_in_strings_are_no_levels() -> None:
    text = json.dumps({"prompt": "[{" * 40 + '\\"' + "[" * 40})
    assert json_object(text.encode(), max_depth=2) == json.loads(text)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "prompt is missing; fix: send prompt"),
        (
            {"prompt": 3},
            "prompt",
            "prompt has a wrong value; found: `int`; fix: send `str | array`",
        ),
        ({"prompt": [1, -2]}, "prompt", "prompt[1] has a wrong value"),
        ({"prompt": "a", "temperature": -1}, "temperature", "fix: send `float` >= 0.0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "found: `str`"),
        ({"prompt": "a", "top_p": 1.5}, "top_p", "fix: send `float` <= 1.0"),
        ({"prompt": "a", "n": 0}, "n", "fix: send `int` >= 1"),
        ({"prompt": "a", "n": True}, "n", "found: `bool`"),
        ({"prompt": "a", "seed": 2**64}, "seed", "fix: send `int` <= "),
        ({"prompt": "a", "logit_bias": {"1": 200}}, "logit_bias", "<= 100.0"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options", "`bool`"),
    ],
)
def test_a_wrong_value_names_its_field_and_what_fits(
    fields: JsonObject, param: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_fields(CompletionBody, fields)
    assert message in caught.value.message
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_null_is_what_is_not_given() -> None:
    body, _ = read_fields(CompletionBody, {"prompt": "a", "temperature": None, "n": None})
    assert (body.temperature, body.n) == (None, None)


def test_fields_that_nothing_reads_are_named() -> None:
    fields = {"prompt": "a", "user": "me", "suffix": None, "priority": 3}
    assert read_fields(CompletionBody, fields)[1] == ("user", "priority")


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, MegatronBody])
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(kind: type) -> None:
    needed: JsonObject = {"prompt": "a", "messages": [], "prompts": []}
    for name, nothing in unsupported_fields(kind).items():
        for value in nothing:
            read_fields(kind, {**needed, name: value})
        with pytest.raises(ApiError) as caught:
            read_fields(kind, {**needed, name: ["something"]})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
        assert f"leave {name} out" in caught.value.message


@examples(100)
@given(st.dictionaries(st.sampled_from([*CompletionBody.__struct_fields__, "x"]), JSON_VALUES))
def test_any_object_is_read_or_refused(fields: JsonObject) -> None:
    with suppress(ApiError):  # and nothing else
        body, ignored = read_fields(CompletionBody, fields)
        assert isinstance(body, CompletionBody)
        assert set(ignored) <= {"x"}
