"""The choice among tools becomes a grammar, whose texts are calls with arguments that match."""

import json
import random
from typing import Any

import msgspec
import pytest

from megatron.data.samples.chat_template import CHATML, ChatTemplate
from megatron.inference.constraint import grammar_table
from megatron.serving.api_errors import ApiError
from megatron.serving.bodies import ChatBody
from megatron.serving.chat_tools.tool_choice import (
    ToolUse,
    called_tools,
    check_calls_are_written,
    tool_use,
)
from megatron.serving.limits import ServerLimits
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.serving.tool_templates import LISTED, MARKED, SINGLE

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
DULL = b" \t\r\n0123456789"  # of which there may be any number
NOW = {"type": "function", "function": {"name": "now", "description": "The time"}}


def used(template: ChatTemplate | None = MARKED, **fields: Any) -> ToolUse | None:
    values = {"messages": [], "tools": [WEATHER, NOW]} | fields
    return tool_use(msgspec.convert(values, ChatBody), template, ServerLimits())


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def drawn(use: ToolUse, seed: int) -> str:
    """Return a random text of the grammar, whose numbers and white space end soon."""
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    table = grammar_table(text_rules(tokenizer), tokenizer.vocab_size)
    assert table is not None
    assert use.grammar is not None
    assert tokenizer.eod is not None
    constraint = table.constraint(use.grammar, frozenset({tokenizer.eod}))
    chance, output = random.Random(seed), list[int]()  # of a test
    while True:
        mask = constraint.allowed(output)
        assert mask is not None
        allowed = [int(token) for token in mask.nonzero()[0]]
        if tokenizer.eod in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return tokenizer.detokenize(output)
        texts = [token for token in allowed if token < 256]
        ends = [token for token in texts if token in b'"}]']
        wanted = [token for token in texts if token not in DULL] or texts
        output.append(chance.choice(ends if ends and chance.random() < 0.5 else wanted))
        assert len(output) < 2000


@pytest.mark.parametrize("template", [MARKED, LISTED, SINGLE], ids=lambda each: each.name)
def test_texts_of_a_required_choice_are_calls_whose_arguments_match(
    template: ChatTemplate,
) -> None:
    use = used(template, tool_choice="required")
    assert use is not None
    counts, names = set(), set()
    for seed in range(8):
        reader = use.reader()
        text = drawn(use, seed)
        found, rest = reader.add(text), reader.end()
        calls = (*found.calls, *rest.calls)
        assert calls, text
        assert found.text + rest.text == ""
        counts.add(len(calls))
        for name, arguments in calls:
            names.add(name)
            values = json.loads(arguments)
            if name == "weather":
                assert values["city"] in ("Bern", "Rome")
                assert type(values["days"]) is int
    assert names == {"weather", "now"}
    assert (len(counts) > 1) is (template is not SINGLE)


def test_a_named_function_is_called_once_and_parallel_calls_can_be_refused() -> None:
    for fields in ({"tool_choice": named("weather")}, {"parallel_tool_calls": False}):
        use = used(**{"tool_choice": "required"} | fields)
        assert use is not None
        assert use.grammar is not None
        assert ")*" not in use.grammar.text
        assert ("weather" in use.names) is True
    named_use = used(tool_choice=named("weather"))
    assert named_use is not None
    assert named_use.names == {"weather"}
    assert len(named_use.tools) == 2, "the template gets all of them"


def test_the_model_chooses_by_default_and_not_at_all_under_none() -> None:
    for choice in (None, "auto"):
        use = used(tool_choice=choice)
        assert use is not None
        assert (use.grammar, use.names) == (None, {"weather", "now"})
    assert use.tools[1] == {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    assert used(tool_choice="none") is None
    assert used(CHATML, tools=[]) is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0]", "type 'web'|no function"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "no function"),
        ({"tools": [named("a b")]}, "tools[0].function.name", "use 1 to 64"),
        ({"tools": [NOW, NOW]}, "tools", "two functions of one name"),
        ({"tool_choice": "any"}, "tool_choice", "found: 'any'"),
        ({"tool_choice": named("else")}, "tool_choice", "no function 'else'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "required without tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        used(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": {"typ": "object"}}, "unknown keyword"),
        ({"parameters": {"type": "string"}}, "a schema of another type"),
        ({"parameters": {"type": "object", "title": "x" * 70_000}}, "bytes"),
        ({"strict": True}, "strict in f, which the model may call or not"),
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(changes: dict[str, Any], message: str) -> None:
    tool = {"type": "function", "function": {"name": "f", **changes}}
    with pytest.raises(ApiError, match=message):
        used(tools=[tool])


@pytest.mark.parametrize("template", [None, CHATML])
def test_templates_that_write_no_tools_are_refused(template: ChatTemplate | None) -> None:
    message = "there is no chat template" if template is None else "does not write tools"
    with pytest.raises(ApiError, match=message):
        used(template)
    with pytest.raises(ApiError, match=message):
        check_calls_are_written(template)


def test_arguments_of_former_calls_are_objects_for_the_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert called_tools([call], "m") == [{**call, "function": {"name": "f", "arguments": {"a": 1}}}]
    for wrong in ("[1]", "{", "{" * 5000):
        call["function"] = {"name": "f", "arguments": wrong}
        with pytest.raises(ApiError, match="no JSON of an object"):
            called_tools([call], "m")
