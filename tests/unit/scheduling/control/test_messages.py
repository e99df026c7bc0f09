"""Tests of megatron.scheduling.control.messages."""

import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.control import messages
from megatron.scheduling.control.messages import (
    KINDS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD,
    MAX_TEXT,
    VERSION,
    Answer,
    Command,
    Hello,
    Message,
    MessageError,
    RankAnswer,
    decode_message,
    encode_message,
)
from megatron.scheduling.control.states import Code, CommandKind
from tests.support.examples import examples

ANY = st.one_of([st.from_type(kind) for kind in KINDS.values()])
SMALL = (-(1 << 63), (1 << 63) - 1)


def is_sendable(message: object) -> bool:
    """Return whether every number and text of a message is one that a receiver takes."""
    if isinstance(message, tuple):
        return all(map(is_sendable, message))
    if dataclasses.is_dataclass(message):
        return all(is_sendable(getattr(message, one.name)) for one in dataclasses.fields(message))
    if isinstance(message, str):
        return len(message) <= MAX_TEXT and message.isprintable()
    return isinstance(message, bool) or SMALL[0] <= typing.cast(int, message) <= SMALL[1]


@examples(300)
@given(message=ANY.filter(is_sendable))
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_a_long_request_arrives_as_it_was_sent() -> None:
    command = Command("c", CommandKind.SUBMIT, request="u", payload="x" * MAX_PAYLOAD)
    assert decode_message(encode_message(command)) == command


def raw(**fields: object) -> bytes:
    return json.dumps({"v": VERSION} | fields).encode()


HELLO = {"kind": "Hello", "member": 1, "incarnation": 2}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "a message is not JSON"),
        (b"\xff\xfe", "a message is not JSON"),
        (b"[" * 100_000, "a message is not JSON"),
        (b'{"v": NaN}', "a message is not JSON"),
        (b'{"v": 1, "v": 1}', "a message is not JSON"),
        (b"[]", "a message is not a JSON object"),
        (b"{}", "a message has another version"),
        (raw(v=2), "a message has another version"),
        (raw(v=True), "a message has another version"),
        (raw(v=1.0), "a message has another version"),
        (raw(), "a message is of an unknown kind"),
        (raw(kind="Message"), "a message is of an unknown kind"),
        (raw(kind=["Hello"]), "a message is of an unknown kind"),
        (raw(kind="Hello", member=1), "Hello lacks a field"),
        (raw(**HELLO, more=1), "Hello has an unknown field"),
        (raw(**HELLO | {"member": "1"}), "member has another type"),
        (raw(**HELLO | {"member": True}), "member has another type"),
        (raw(**HELLO | {"member": 1.0}), "member has another type"),
        (raw(**HELLO | {"member": 1 << 63}), "member has another type, or is too large"),
        (raw(kind="Command", id="x" * (MAX_TEXT + 1), command="stop"), "id has another type"),
        (
            raw(kind="Command", id="x", command="submit", payload="x" * (MAX_PAYLOAD + 1)),
            "payload has another type, or is too large",
        ),
        (raw(kind="Command", id="x", command="halt"), "command has an unknown value"),
        (raw(kind="Command", id="x", command=["stop"]), "command has an unknown value"),
        (raw(kind="Command", id="x", command="stop", cancel=0), "cancel has another type"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(MessageError, match=problem):
        decode_message(data)


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ({}, "ranks is not a list, or too long"),
        ([1], "ranks is not an object"),
        ([{"member": 1}], "RankAnswer lacks a field"),
        ([{"member": 1, "verdict": "ack"}] * 3, "ranks is not a list, or too long"),
    ],
)
def test_parts_of_a_message_are_checked_too(
    ranks: object, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_ITEMS", 2)
    data = raw(kind="Answer", id="x", code="ok", state="running", epoch=1, ranks=ranks)
    with pytest.raises(MessageError, match=problem):
        decode_message(data)


def test_what_is_too_long_is_neither_sent_nor_read() -> None:
    ranks = (RankAnswer(1, "ack", "x" * MAX_TEXT),) * 300
    with pytest.raises(MessageError, match="too long to be sent"):
        encode_message(Answer("x", Code.OK, "running", 1, ranks=ranks))
    with pytest.raises(MessageError, match="a message is too long"):
        decode_message(b" " * (MAX_MESSAGE_BYTES + 1))


def test_a_refusal_shows_an_excerpt() -> None:
    with pytest.raises(MessageError, match="an unknown value") as refused:
        decode_message(raw(kind="Command", id="x", command="y" * 1000))
    assert refused.value.found is not None
    assert len(str(refused.value.found)) < 120


@examples(400)
@given(data=st.data())
def test_damaged_bytes_are_a_message_or_refused_and_nothing_else(data: st.DataObject) -> None:
    good = data.draw(
        st.sampled_from(
            (Hello(1, 2), Command("a", CommandKind.PAUSE), Answer("a", Code.OK, "x", 1))
        )
    )
    content = bytearray(encode_message(good))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        message = decode_message(bytes(content))
    except MessageError:
        return
    assert isinstance(message, typing.get_args(Message))
