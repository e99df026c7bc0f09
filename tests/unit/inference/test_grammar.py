"""Keywords of a JSON schema that nobody knows are named with their place."""

import pytest

from megatron.errors import ConfigError
from megatron.inference.grammar import check_json_schema
from megatron.json_values import JsonValue

PERSON: JsonValue = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "title": "Person",
    "properties": {
        # Names and values are no keywords.
        "titel": {"type": "string", "default": {"maxLenght": 1}},
        "tags": {"type": "array", "items": {"enum": ["a", {"maxLenght": 1}]}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["titel"],
    "dependencies": {"tags": ["titel"], "next": {"minProperties": 2}},
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "example": 3}},
}


def test_a_schema_of_known_keywords_is_accepted() -> None:
    check_json_schema(PERSON)
    check_json_schema(True)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"maxLenght": 3}, "'maxLenght' at $"),
        ({"properties": {"a": {"maxLenght": 3}}}, "'maxLenght' at $.properties.a"),
        ({"items": {"x-guidance": {}}}, "'x-guidance' at $.items"),
        ({"anyOf": [{}, {"nullable": True}]}, "'nullable' at $.anyOf[1]"),
        ({"$defs": {"a": {"not": {"typ": 1}}}}, "'typ' at $.$defs.a.not"),
        ({"dependencies": {"a": ["b"], "c": {"d": 1}}}, "'d' at $.dependencies.c"),
    ],
)
def test_an_unknown_keyword_is_named_with_its_place(schema: JsonValue, found: str) -> None:
    with pytest.raises(ConfigError, match="a JSON schema has an unknown keyword") as caught:
        check_json_schema(schema)
    assert caught.value.found == found
