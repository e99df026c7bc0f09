"""Requests and events of an engine as text that the control plane carries to another process.

It is MessagePack of strict types, whose numbers may be infinite, in base64. Times are those of the
monotonic clock, which the processes of one machine share.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from megatron.errors import MegatronError
from megatron.serving.engine_client import EngineEvent, EngineRequest, PromptScored, TokenDrawn


class PayloadError(MegatronError):
    """A text is no request or event of an engine of this version."""


@dataclass(frozen=True, slots=True)
class _Event:
    """An event that is not the last one; one of the two is there."""

    token: TokenDrawn | None = None
    prompt: PromptScored | None = None


Value = TypeVar("Value")


def encode_request(request: EngineRequest) -> str:
    """Return a request as text."""
    return _text(request)


def decode_request(text: str) -> EngineRequest:
    """Return the request that a text holds; raises PayloadError."""
    return _value(text, EngineRequest)


def encode_event(event: TokenDrawn | PromptScored) -> str:
    """Return an event as text."""
    return _text(_Event(token=event) if isinstance(event, TokenDrawn) else _Event(prompt=event))


def decode_event(text: str) -> EngineEvent:
    """Return the event that a text holds; raises PayloadError."""
    found = _value(text, _Event)
    event = found.token if found.token is not None else found.prompt
    if event is None:
        raise _refusal("neither a token nor the scores of a prompt")
    return event


def _text(value: object) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value, enc_hook=_plain)).decode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):  # one that cannot be changed
        return dict(value)
    raise NotImplementedError(type(value).__name__)


def _value(text: str, kind: type[Value]) -> Value:
    try:
        return msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=kind)
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise _refusal(str(error)) from None


def _refusal(found: str) -> PayloadError:
    return PayloadError(
        "a text is no request or event of an engine",
        found=found[:200],
        fix="run the same code on all ranks",
    )
