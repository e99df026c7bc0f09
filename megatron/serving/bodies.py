"""The bodies of requests, as strict structures, and how they are read.

A field of the wrong type is an error that names it. Fields that no structure has are reported: the
caller notes them, or refuses them. Fields that would change the answer and have no effect here are
refused where they ask for anything. What values mean is left to `conversion`.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from megatron.json_values import JsonObject, JsonValue
from megatron.serving.api_errors import ApiError, ErrorCode

NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Count: TypeAlias = Annotated[int, Meta(ge=0)]
PositiveCount: TypeAlias = Annotated[int, Meta(ge=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
# One text, several, the tokens of one, or of several.
Prompt: TypeAlias = str | list[str | TokenId | list[TokenId]]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # there is none either way


class SamplingBody(msgspec.Struct, kw_only=True):
    """Fields that completions and chats share; None is what the interface leaves to the server."""

    model: str | None = None
    temperature: NonNegative | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # 0 or -1: all
    min_p: Share | None = None
    n: PositiveCount | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    response_format: dict[str, object] | None = None
    structured_outputs: dict[str, object] | None = None  # of vLLM, as those that follow
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Count | None = None
    logprobs: Count | None = None
    echo: bool | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class CalledFunctionBody(msgspec.Struct, kw_only=True):
    """What was called of a tool; `arguments` is a JSON text."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct, kw_only=True):
    """A call in a former answer."""

    function: CalledFunctionBody
    id: str | None = None
    type: str = "function"


class ChatMessageBody(msgspec.Struct, kw_only=True):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionBody(msgspec.Struct, kw_only=True):
    """A function that a model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    """A tool of a chat."""

    type: str
    function: FunctionBody | None = None


class ChatBody(SamplingBody, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessageBody]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: Prompt
    model: str | None = None
    encoding_format: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: list[ChatMessageBody] | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class MegatronBody(msgspec.Struct, kw_only=True):
    """The body of Megatron's `PUT /api`."""

    prompts: list[str]
    tokens_to_generate: Count | None = None
    logprobs: bool | None = None
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1000)] | None = None
    top_p: Share | None = None
    add_BOS: bool | None = None  # noqa: N815 - its name there
    stop_on_double_eol: bool | None = None
    stop_on_eol: bool | None = None
    random_seed: Seed | None = None
    stop_token: TokenId | None = None


# What would change an answer, and is not here, with the values that ask for nothing.
NOTHING: tuple[JsonValue, ...] = (None, False, [], {}, "", 0)
UNSUPPORTED: Mapping[type[msgspec.Struct], Mapping[str, tuple[JsonValue, ...]]] = {
    SamplingBody: {
        "best_of": (*NOTHING, 1),
        "use_beam_search": NOTHING,
        "length_penalty": (*NOTHING, 1),
        "bad_words": NOTHING,
        "allowed_token_ids": NOTHING,
        "truncate_prompt_tokens": NOTHING,
        "grammar": NOTHING,
        "json_schema": NOTHING,
        "logits_processors": NOTHING,
        "include_stop_str_in_output": NOTHING,
        "typical_p": (*NOTHING, 1),
        "mirostat": NOTHING,
    },
    CompletionBody: {
        "suffix": NOTHING,
        "prompt_embeds": NOTHING,
        "add_special_tokens": (None, True),
    },
    ChatBody: {
        "functions": NOTHING,
        "function_call": (*NOTHING, "none", "auto"),
        "modalities": (*NOTHING, ["text"]),
        "audio": NOTHING,
        "web_search_options": NOTHING,
        "chat_template": NOTHING,
        "chat_template_kwargs": NOTHING,
        "continue_final_message": NOTHING,
        "add_generation_prompt": (None, True),
    },
    EmbeddingBody: {"dimensions": NOTHING},
    MegatronBody: {
        "top_p_decay": NOTHING,
        "top_p_bound": NOTHING,
        "prevent_newline_after_colon": NOTHING,
        "length_penalty": (*NOTHING, 1),
        "max_len": NOTHING,
        "sentences": NOTHING,
        "beam_width": NOTHING,
    },
}
# Takes an unfinished string to the end as well, so that no place is looked at twice.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_OPENING = np.frombuffer(b"[{", np.uint8)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PLACE = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)

Body = TypeVar("Body", bound=msgspec.Struct)


def json_object(data: bytes, *, max_depth: int) -> dict[str, JsonValue]:
    """Return the object of a body.

    Raises:
        ApiError: it is not the JSON of an object, or lies too deep in itself.
    """
    if (depth := _depth(data)) > max_depth:
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "objects and lists of the body lie too deep in each other",
            found=f"{depth} levels",
            fix=f"send at most {max_depth} levels",
        )
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "the body is not JSON",
            found=str(error),
            fix="send one JSON object in UTF-8",
        ) from error
    if not isinstance(value, dict):
        raise ApiError(
            ErrorCode.INVALID_JSON,
            "the body is not a JSON object",
            found=f"a JSON {_JSON_NAMES.get(type(value), 'value')}",
            fix='send an object such as {"prompt": "Hello"}',
        )
    return value


_JSON_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "boolean"}


def read_fields(kind: type[Body], fields: JsonObject) -> tuple[Body, tuple[str, ...]]:
    """Return a structure of `kind`, and the names of the fields that it does not have.

    Raises:
        ApiError: a field that is missing, has a wrong value, or asks for what is not here.
    """
    refused = unsupported_fields(kind)
    for name, nothing in refused.items():
        if name in fields and fields[name] not in nothing:
            raise ApiError(
                ErrorCode.UNSUPPORTED,
                f"{name} is not supported, and the answer would be another one without it",
                found=f"{name} in the body",
                fix=f"leave {name} out",
                param=name,
            )
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    ignored = tuple(name for name in fields if name not in known and name not in refused)
    try:
        return msgspec.convert(fields, kind), ignored
    except msgspec.ValidationError as error:
        raise _wrong_value(error) from error


def unsupported_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[JsonValue, ...]]:
    """Return the fields refused in a body of `kind`, with the values that ask for nothing."""
    return {
        name: nothing
        for base in kind.__mro__
        for name, nothing in UNSUPPORTED.get(base, {}).items()
    }


def _wrong_value(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    place = _PLACE.search(text)
    path = place[1] if place else ""
    reason = text[: place.start()] if place else text
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        name = f"{path}.{missing[1]}".removeprefix(".")
        return ApiError(
            ErrorCode.INVALID_VALUE, f"{name} is missing", fix=f"send {name}", param=name
        )
    expected = re.fullmatch(r"Expected (.+?)(?:, got (.+))?", reason)
    return ApiError(
        ErrorCode.INVALID_VALUE,
        f"{path or 'the body'} has a wrong value",
        found=(expected[2] or "a value out of range") if expected else reason,
        fix=f"send {expected[1] if expected else 'another value'}",
        param=re.split(r"[.\[]", path)[0] or None,
    )


def _depth(data: bytes) -> int:
    """Return how deep objects and lists of a JSON text lie in each other."""
    brackets = _STRINGS.sub(b"", data).translate(None, _NO_BRACKETS)
    steps = np.where(np.isin(np.frombuffer(brackets, np.uint8), _OPENING), 1, -1)
    return int(np.cumsum(steps).max(initial=0))
