"""What coordinator, members and clients of the control plane send each other, and its coding.

A message is one JSON object, in which "kind" names its class. Fields are checked by type and
length; what is unknown, missing or too long is refused, and nothing is executed.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from megatron.errors import MegatronError
from megatron.json_values import JsonObject, JsonValue, parse_json
from megatron.scheduling.control.states import Code, CommandKind, Mode, ServingState, TransitionKind

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_TEXT = 4096  # characters of an id or a detail
MAX_PAYLOAD = 1 << 19  # characters of what the control plane carries and does not look at
MAX_ITEMS = 1 << 16
_MAX_INTEGER = 1 << 63


class MessageError(MegatronError):
    """Bytes that are no message of this protocol; the connection that sent them is at fault."""


class Phase(StrEnum):
    """A part of a transition; members acknowledge each."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Command:
    """A client's command.

    Attributes:
        id: chosen by the client; a repeated command gets the same answer and is done once.
        command: what is asked for.
        mode: how; DEFAULT is the first mode of the transition.
        request: SUBMIT and ABORT: id of the request.
        weights: NEW_WEIGHTS: the version.
        source: NEW_WEIGHTS: where they are, such as a folder.
        payload: SUBMIT: the request.
        sample: ABORT: the only sample of the request that is to end; -1: all of it.
        remaining_ms: how long the transition may be prepared; 0 means the default. A duration,
            since clocks of two processes are never compared.
        cancel: RESUME: end a pause that has not been decided, instead of waiting for it.
    """

    id: str
    command: CommandKind
    mode: Mode = Mode.DEFAULT
    request: str = ""
    weights: int = 0
    remaining_ms: int = 0
    cancel: bool = False
    source: str = ""
    payload: str = ""
    sample: int = -1


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank contributed to an answer."""

    member: int
    verdict: str  # "ack", "silent", "lost", or the code with which it refused
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The one answer to a command.

    Attributes:
        id: of the command.
        code: OK, or why it was not done.
        state: of the engine when the answer was given.
        epoch: of the transition that was made or is being made; else of the last one.
        detail: a sentence.
        ranks: an answer of each rank that took part.
    """

    id: str
    code: Code
    state: str
    epoch: int
    detail: str = ""
    ranks: tuple[RankAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """A member has loaded, and asks to take part.

    Attributes:
        member: its rank.
        incarnation: larger with each start of the process, and each time that it begins again.
    """

    member: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """A member may take part if it takes this state: it has no requests yet."""

    term: int
    member: int
    incarnation: int
    state: ServingState
    epoch: int
    weights: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A member has taken the state of a `Welcome`."""

    member: int
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Dismissed:
    """A process is no member: it ends its requests, and may say `Hello` again."""

    term: int
    member: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Do the part of a transition that can be undone, and acknowledge."""

    term: int
    member: int
    incarnation: int
    epoch: int
    transition: TransitionKind
    target: ServingState
    mode: Mode
    weights: int
    remaining_ms: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Decide:
    """Commit or roll back a transition, and acknowledge."""

    term: int
    member: int
    incarnation: int
    epoch: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Ack:
    """A member has done a phase of a transition."""

    member: int
    incarnation: int
    epoch: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Nack:
    """A member cannot prepare a transition, and has not begun."""

    member: int
    incarnation: int
    epoch: int
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member lives, and where it is."""

    member: int
    incarnation: int
    state: ServingState
    epoch: int
    running: int
    waiting: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The coordinator has heard a member, which may go on until its own lease ends."""

    term: int
    member: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class RequestStart:
    """A request for the replica of a member."""

    term: int
    member: int
    incarnation: int
    request: str
    payload: str = ""


@dataclass(frozen=True, slots=True)
class RequestAbort:
    """A request that a member shall end, or one sample of it."""

    term: int
    member: int
    incarnation: int
    request: str
    sample: int = -1


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """More of an answer, for the client: from the first on the request cannot be moved any more."""

    member: int
    incarnation: int
    request: str
    payload: str = ""


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A request has ended: completed, failed, aborted or expired."""

    member: int
    incarnation: int
    request: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A member cannot compute any more."""

    member: int
    incarnation: int
    detail: str


Message = (
    Command
    | Answer
    | Hello
    | Welcome
    | Joined
    | Dismissed
    | Prepare
    | Decide
    | Ack
    | Nack
    | Heartbeat
    | Lease
    | RequestStart
    | RequestAbort
    | RequestProgress
    | RequestDone
    | Failed
)
ToCoordinator = (
    Command | Hello | Joined | Ack | Nack | Heartbeat | RequestProgress | RequestDone | Failed
)
ToMember = Welcome | Dismissed | Prepare | Decide | Lease | RequestStart | RequestAbort
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode_message(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        MessageError: it is longer than a receiver takes.
    """
    fields = {"v": VERSION, "kind": type(message).__name__} | dataclasses.asdict(message)
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise _refusal("a message is too long to be sent", f"{len(data)} bytes")
    return data


def decode_message(data: bytes) -> Message:
    """Return the message that `encode_message` made bytes of.

    Raises:
        MessageError: the bytes are no message of this version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise _refusal("a message is too long", f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        fields = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise _refusal("a message is not JSON", _excerpt(error)) from None
    if not isinstance(fields, Mapping):
        raise _refusal("a message is not a JSON object", _excerpt(type(fields).__name__))
    if fields.get("v") != VERSION or type(fields["v"]) is not int:
        raise _refusal(
            "a message has another version", f"{_excerpt(fields.get('v'))}, here {VERSION}"
        )
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _refusal("a message is of an unknown kind", _excerpt(kind))
    return _built(KINDS[kind], {key: fields[key] for key in fields if key not in ("v", "kind")})


Built = typing.TypeVar("Built")


def _built(kind: type[Built], values: JsonObject) -> Built:
    types_of, required = _fields_of(kind)  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - types_of.keys()):
        raise _refusal(f"{kind.__name__} has an unknown field", _excerpt(unknown[0]))
    if missing := sorted(required - values.keys()):
        raise _refusal(f"{kind.__name__} lacks a field", missing[0])
    return kind(**{name: _checked(types_of[name], name, value) for name, value in values.items()})


@cache
def _fields_of(kind: type) -> tuple[dict[str, object], frozenset[str]]:
    hints = typing.get_type_hints(kind)
    required = (
        field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING
    )
    return hints, frozenset(required)


def _checked(hint: object, name: str, value: JsonValue) -> object:
    """Return a field's value of its type, from what JSON has for it."""
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise _refusal(f"{name} is not a list, or too long", _excerpt(value))
        item = typing.get_args(hint)[0]
        return tuple(_checked(item, name, one) for one in value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _refusal(f"{name} is not an object", _excerpt(value))
        return _built(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        if value not in list(hint):
            raise _refusal(f"{name} has an unknown value", _excerpt(value))
        return hint(value)
    is_right = type(value) is hint
    if isinstance(value, str):
        is_right = is_right and len(value) <= (MAX_PAYLOAD if name == "payload" else MAX_TEXT)
    elif type(value) is int:
        is_right = is_right and -_MAX_INTEGER <= value < _MAX_INTEGER
    if not is_right:
        raise _refusal(f"{name} has another type, or is too large", _excerpt(value))
    return value


def _excerpt(value: object) -> str:
    text = repr(value) if not isinstance(value, Exception) else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _refusal(problem: str, found: str) -> MessageError:
    return MessageError(problem, found=found, fix="use the client of this version")
