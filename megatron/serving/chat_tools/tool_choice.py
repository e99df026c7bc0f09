"""The tools of a chat: what its template gets, and what the choice among them asks for."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.data.samples.chat_template import ChatTemplate
from megatron.errors import ConfigError
from megatron.inference.grammar import Grammar, GrammarKind
from megatron.json_values import JsonObject, JsonValue, parse_json
from megatron.serving.answer_grammars import check_schema
from megatron.serving.api_errors import ApiError, ErrorCode, invalid_value, refused_by
from megatron.serving.bodies import ChatBody, FunctionBody, ToolBody
from megatron.serving.chat_tools.call_format import CallFormat, call_format
from megatron.serving.chat_tools.call_reader import CallReader
from megatron.serving.limits import ServerLimits

_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of an answer.

    Attributes:
        tools: as the template gets them.
        format: how the model writes calls.
        names: of the functions that may be called.
        grammar: of an answer that has to be calls; None: the model chooses.
    """

    tools: tuple[JsonObject, ...]
    format: CallFormat
    names: frozenset[str]
    grammar: Grammar | None = None

    def reader(self) -> CallReader:
        """Return what finds the calls in one answer."""
        return CallReader(self.format, self.names)


def tool_use(body: ChatBody, template: ChatTemplate | None, limits: ServerLimits) -> ToolUse | None:
    """Return how a chat uses its tools; None: not at all. Raises ApiError."""
    given = enumerate(body.tools or ())
    functions = [_function(tool, f"tools[{at}]", limits) for at, tool in given]
    chosen = _chosen(body.tool_choice, {each.name for each in functions})
    if chosen == "none" or not functions:
        return None
    names = [each.name for each in functions]
    if len(set(names)) < len(names):
        raise invalid_value("tools", "two functions of one name", "give each another name")
    form = _format(template, "tools")
    tools = tuple(_for_template(each) for each in functions)
    if chosen == "auto":
        if strict := [each.name for each in functions if each.strict]:
            raise invalid_value(
                "tools",
                f"strict in {strict[0]}, which the model may call or not",
                "set tool_choice to required or to a function, or leave strict out",
            )
        return ToolUse(tools, form, frozenset(names))
    allowed = [each for each in functions if chosen in ("required", ("function", each.name))]
    is_one = chosen != "required" or body.parallel_tool_calls is False
    grammar = calls_grammar(form, {f.name: _parameters(f) for f in allowed}, only_one=is_one)
    return ToolUse(tools, form, frozenset(each.name for each in allowed), grammar)


def check_calls_are_written(template: ChatTemplate | None) -> None:
    """Check that calls in former answers do not disappear from a prompt; raises ApiError."""
    _format(template, "messages")


def _format(template: ChatTemplate | None, param: str) -> CallFormat:
    if template is None:
        fix = "start the server with --chat-template"
        raise ApiError(ErrorCode.UNSUPPORTED, "there is no chat template", fix=fix, param=param)
    try:
        return call_format(template)
    except ConfigError as error:
        raise refused_by(error, param=param) from error


def calls_grammar(
    form: CallFormat, parameters: Mapping[str, JsonObject], *, only_one: bool
) -> Grammar:
    """Return the grammar of answers that are calls of some functions, one at least.

    Args:
        parameters: the schema of the arguments of each function.
    """
    more = "" if only_one or form.separator is None else f"({_literal(form.separator)} call)*"
    calls = [
        f"{_literal(name)} {_literal(form.between)} arguments_{at}"
        for at, name in enumerate(parameters)
    ]
    lines = [
        f"start: {_literal(form.before)} call {more} {_literal(form.after)}",
        f"call: {' | '.join(calls)}",
        *(
            f"arguments_{at}: %json {json.dumps(schema)}"
            for at, schema in enumerate(parameters.values())
        ),
    ]
    return Grammar(GrammarKind.LARK, "\n".join(lines))


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _function(tool: ToolBody, param: str, limits: ServerLimits) -> FunctionBody:
    if tool.type != "function" or tool.function is None:
        raise invalid_value(
            param,
            f"type {tool.type!r}" if tool.function else "no function",
            'send {"type": "function", "function": {"name": "...", "parameters": {...}}}',
        )
    function = tool.function
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.name):
        raise invalid_value(
            f"{param}.function.name", repr(function.name), "use 1 to 64 of A-Z a-z 0-9 _ -"
        )
    schema = json.dumps(_parameters(function))
    name = f"{param}.function.parameters"
    if len(schema) > limits.max_schema_bytes:
        fix = f"use {limits.max_schema_bytes} or fewer"
        raise invalid_value(name, f"{len(schema)} bytes", fix)
    check_schema(schema, limits, param=name)
    if _parameters(function).get("type") != "object":
        raise invalid_value(name, "a schema of another type", 'use {"type": "object", ...}')
    return function


def _parameters(function: FunctionBody) -> JsonObject:
    return function.parameters or _NO_PARAMETERS


def _for_template(function: FunctionBody) -> JsonObject:
    made: dict[str, JsonValue] = {"name": function.name}
    if function.description is not None:
        made["description"] = function.description
    made["parameters"] = _parameters(function)
    return {"type": "function", "function": made}


def _chosen(choice: str | dict[str, JsonValue] | None, names: set[str]) -> str | tuple[str, str]:
    """Return none, auto, required, or "function" with the name of one; raises ApiError."""
    fix = 'use none, auto, required, or {"type": "function", "function": {"name": "..."}}'
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise invalid_value("tool_choice", json.dumps(choice)[:100], fix)
        if name not in names:
            raise invalid_value("tool_choice", f"no function {name!r} in tools", fix)
        return "function", name
    chosen = choice or "auto"
    if chosen not in ("none", "auto", "required"):
        raise invalid_value("tool_choice", repr(chosen), fix)
    if chosen == "required" and not names:
        raise invalid_value("tool_choice", "required without tools", "send tools")
    return chosen


def called_tools(calls: Sequence[JsonObject], param: str) -> list[JsonValue]:
    """Return the calls of a former answer as templates get them: arguments are objects.

    Raises:
        ApiError: arguments are not the JSON of an object.
    """
    made: list[JsonValue] = []
    for at, call in enumerate(calls):
        function = call["function"]
        assert isinstance(function, Mapping)  # noqa: S101  # invariant: of the structure of bodies
        try:
            arguments = parse_json(str(function["arguments"]) or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            name = f"{param}[{at}].function.arguments"
            raise invalid_value(name, "no JSON of an object", "send the arguments as JSON")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
