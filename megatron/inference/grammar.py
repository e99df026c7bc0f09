"""What a text has to be: a JSON schema, a regular expression, choices or a grammar, as data.

A keyword of a schema that nobody knows is an error here; the library that compiles grammars names
known keywords that it does not implement, and would ignore the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue


class GrammarKind(StrEnum):
    """How the text of a grammar is read."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts
    LARK = "grammar"  # a context-free grammar as Lark has it, or as llama.cpp (GBNF)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a generated text has to match from its beginning to its end."""

    kind: GrammarKind
    text: str


# Of JSON Schema 2020-12 and draft 7, and of OpenAPI: annotations are accepted, and mean nothing.
_PLAIN = frozenset(
    {
        *("type", "enum", "const", "format", "pattern", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "uniqueItems", "minContains", "maxContains"),
        *("minProperties", "maxProperties", "required", "dependentRequired"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        *("$ref", "$id", "$schema", "$anchor", "$comment", "$dynamicRef", "$dynamicAnchor"),
        *("$vocabulary", "title", "description", "default", "examples", "example", "deprecated"),
        *("readOnly", "writeOnly", "discriminator", "externalDocs", "xml"),
    }
)
_OF_SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "prefixItems", "contains", "additionalProperties"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "not", "if", "then"),
        *("else", "allOf", "anyOf", "oneOf"),
    }
)
_OF_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def check_json_schema(schema: JsonValue) -> None:
    """Check that all keywords of a schema are known.

    Raises:
        ConfigError: one is not; it is named with its place.
    """
    for place, keyword in _unknown_keywords(schema, "$"):
        raise ConfigError(
            "a JSON schema has an unknown keyword",
            found=f"{keyword!r} at {place}",
            fix="correct it or leave it out; a keyword that means nothing could be a mistyped one",
        )


def _unknown_keywords(schema: JsonValue, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(schema, Mapping):
        for keyword, value in schema.items():
            if keyword in _OF_SCHEMAS:
                yield from _unknown_keywords(value, f"{place}.{keyword}")
            elif keyword in _OF_NAMED_SCHEMAS and isinstance(value, Mapping):
                for name, each in _schemas(value):
                    yield from _unknown_keywords(each, f"{place}.{keyword}.{name}")
            elif keyword not in _PLAIN and keyword not in _OF_NAMED_SCHEMAS:
                yield place, keyword
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        for number, each in enumerate(schema):
            yield from _unknown_keywords(each, f"{place}[{number}]")


def _schemas(named: JsonObject) -> Iterator[tuple[str, JsonValue]]:
    """Yield schemas by name; `dependencies` may have lists of names in place of schemas."""
    for name, each in named.items():
        if isinstance(each, Mapping):
            yield name, each
