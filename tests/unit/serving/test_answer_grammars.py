"""What answers have to match comes from one field; test_app.py has every refusal."""

import json

import pytest

from megatron.inference.grammar import Grammar, GrammarKind
from megatron.serving.answer_grammars import answer_grammar
from megatron.serving.bodies import CompletionBody
from megatron.serving.limits import ServerLimits

OBJECT = {"type": "object", "properties": {"b": {}, "a": {}}}
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT)),  # in the order of its names
        ),
        ({"guided_json": OBJECT}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT))),
        ({"guided_json": '{"type":"null"}'}, Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}')),
        ({"guided_regex": "a+", "guided_choice": []}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICE, '["a", "b"]')),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_grammar": "start: A"}, Grammar(GrammarKind.LARK, "start: A")),
        (
            {"structured_outputs": {"grammar": "root ::= A"}},
            Grammar(GrammarKind.LARK, "root ::= A"),
        ),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar(GrammarKind.CHOICE, '["a"]')),
        (
            {"structured_outputs": {"json": OBJECT}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT)),
        ),
    ],
)
def test_the_grammar_of_an_answer_is_said_in_any_of_the_usual_ways(
    fields: dict[str, object], grammar: Grammar | None
) -> None:
    body = CompletionBody(prompt="a", **fields)  # type: ignore[arg-type]
    assert answer_grammar(body, ServerLimits()) == grammar
