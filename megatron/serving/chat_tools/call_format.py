"""How a chat template writes calls of tools, found out by letting it write some.

A model answers in the form in which its template wrote the calls that it was trained with. So there
is no parser for each family of models: the template is asked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.data.samples.chat_template import END_OF_DOCUMENT, ChatTemplate
from megatron.errors import ConfigError, DataError
from megatron.json_values import JsonObject, JsonValue

_NAMES = ("first_example", "second_example")
_ARGUMENTS = tuple({f"{name}_key": "value"} for name in _NAMES)
_USER: JsonObject = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The texts around name and arguments, which are a JSON object, of the calls in an answer.

    Attributes:
        before: the first name.
        between: a name and its arguments.
        after: the last arguments.
        separator: arguments and the next name; None where a template writes one call only.
    """

    before: str
    between: str
    after: str
    separator: str | None = None


def call_format(template: ChatTemplate) -> CallFormat:
    """Return how a template writes calls.

    Raises:
        ConfigError: it does not write tools, or calls without JSON.
    """
    tools = [_tool(name) for name in _NAMES]
    try:
        without = template.written([_USER], add_generation_prompt=True)
        prompt = template.written([_USER], tools=tools, add_generation_prompt=True)
        if prompt == without:
            raise _unusable(template, "a prompt is the same with and without them")
        answer = _answer(template, tools, prompt, calls=1)
        found = _parts(answer, 0)
        if found is None:
            raise _unusable(template, f"it writes a call as {answer[:200]!r}")
        before, between, rest = found
        after = _without_end(template, rest)
    except DataError as error:
        raise _unusable(template, error.found) from error
    return CallFormat(before, between, after, _separator(template, tools, prompt, found))


def _separator(
    template: ChatTemplate, tools: Sequence[JsonObject], prompt: str, one: tuple[str, str, str]
) -> str | None:
    """Return what stands between two calls; None if a template writes no two alike."""
    try:
        answer = _answer(template, tools, prompt, calls=2)
    except DataError:
        return None
    first = _parts(answer, 0)
    second = None if first is None else _parts(first[2], 1)
    if first is None or second is None or first[:2] != one[:2] or second[1:] != one[1:]:
        return None
    return second[0]


def _answer(template: ChatTemplate, tools: Sequence[JsonObject], prompt: str, *, calls: int) -> str:
    """Return the text of an answer with calls, behind its prompt."""
    made: list[JsonValue] = [
        # Some templates want ids of nine characters.
        {"id": f"example0{at}", **_tool_part({"name": _NAMES[at], "arguments": _ARGUMENTS[at]})}
        for at in range(calls)
    ]
    message: JsonObject = {"role": "assistant", "content": "", "tool_calls": made}
    text = template.written([_USER, message], tools=tools)
    if not text.startswith(prompt):
        raise DataError(
            "a template does not write an answer behind its prompt",
            found="other text before an answer than in a prompt for it",
            fix="use another template",
        )
    return text[len(prompt) :]


def _parts(text: str, at: int) -> tuple[str, str, str] | None:
    """Return what stands before the name of a call, before its arguments, and behind these."""
    before, name, rest = text.partition(_NAMES[at])
    start = rest.find("{")
    while name and start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(rest, start)
        except ValueError:
            value, end = None, 0
        if value == _ARGUMENTS[at]:
            return before, rest[:start], rest[end:]
        start = rest.find("{", start + 1)
    return None


def _without_end(template: ChatTemplate, rest: str) -> str:
    """Return text up to the end of a message, which is a token, or a text of the template."""
    ends = [END_OF_DOCUMENT, template.end.strip(), *template.reserved]
    places = [place for end in ends if end and (place := rest.find(end)) >= 0]
    return rest[: min(places, default=len(rest))].rstrip()


def _tool(name: str) -> JsonObject:
    parameters: JsonObject = {"type": "object", "properties": {}}
    return _tool_part({"name": name, "description": name, "parameters": parameters})


def _tool_part(function: JsonObject) -> dict[str, JsonValue]:
    return {"type": "function", "function": function}


def _unusable(template: ChatTemplate, found: object) -> ConfigError:
    return ConfigError(
        f"the chat template {template.name} does not write tools in a way that is understood",
        found=found,
        fix="leave tools out, or start the server with the --chat-template of a model that was "
        "trained with tools",
    )
