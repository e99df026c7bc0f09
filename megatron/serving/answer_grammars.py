"""What answers have to match, by the fields of OpenAI and of vLLM that say it."""

import json

from megatron.errors import ConfigError
from megatron.inference.grammar import Grammar, GrammarKind, check_json_schema
from megatron.serving.api_errors import ApiError, invalid_value, refused_by
from megatron.serving.bodies import NOTHING, SamplingBody, json_object
from megatron.serving.limits import ServerLimits

_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def answer_grammar(body: SamplingBody, limits: ServerLimits) -> Grammar | None:
    """Return what the answer has to match, by whichever field says it; raises ApiError."""
    given = {name: getattr(body, name) for name in _GRAMMARS}
    given = {name: value for name, value in given.items() if value not in NOTHING}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    if len(given) > 1:
        raise invalid_value(
            sorted(given)[-1], " and ".join(given), "say in one way what answers are"
        )
    for name, value in given.items():
        grammar = _grammar_of(name, value, param=name)
        if (size := len(grammar.text.encode())) > limits.max_schema_bytes:
            raise invalid_value(name, f"{size} bytes", f"use {limits.max_schema_bytes} or fewer")
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            check_schema(grammar.text, limits, param=name)
        return grammar
    return None


def check_schema(text: str, limits: ServerLimits, *, param: str) -> None:
    """Check that a text is a JSON schema of known keywords; raises ApiError otherwise."""
    try:
        check_json_schema(json_object(text.encode(), max_depth=limits.max_json_depth))
    except ApiError as error:
        raise invalid_value(param, error.message, "send the JSON of a schema") from error
    except ConfigError as error:
        raise refused_by(error, param=param) from error


def _grammar_of(name: str, value: object, *, param: str) -> Grammar:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        items = value.items() if isinstance(value, dict) else ()
        kinds = {str(key): each for key, each in items if each not in NOTHING}
        ways = {each: f"guided_{each}" for each in ("json", "regex", "choice", "grammar")}
        if kinds == {"json_object": True}:
            return _ANY_OBJECT
        (kind, inner), *others = kinds.items() or (("nothing", None),)
        if others or kind not in ways:
            found = ", ".join(kinds) or kind
            raise invalid_value(name, found, "use one of json, regex, choice, grammar, json_object")
        return _grammar_of(ways[kind], inner, param=param)
    if name == "guided_choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise invalid_value(param, type(value).__name__, "send a list of texts")
        return Grammar(GrammarKind.CHOICE, json.dumps(value))
    if name in ("guided_regex", "guided_grammar"):
        if not isinstance(value, str):
            raise invalid_value(param, type(value).__name__, "send a text")
        is_regex = name == "guided_regex"
        return Grammar(GrammarKind.REGEX if is_regex else GrammarKind.LARK, value)
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


def _response_format(value: object) -> Grammar:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        return _ANY_OBJECT
    inner = value.get("json_schema") if isinstance(value, dict) else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise invalid_value(
            "response_format",
            "no json_schema.schema" if kind == "json_schema" else f"type {kind!r}",
            'use {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"name": "...", "schema": {...}}}',
        )
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
