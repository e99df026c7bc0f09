"""Calls are read from an answer however it is cut into parts; what is none stays text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.serving.chat_tools.call_format import CallFormat, call_format
from megatron.serving.chat_tools.call_reader import CallReader, ToolCall
from tests.support.examples import examples
from tests.support.serving.tool_templates import LISTED, MARKED, SINGLE

FORMS = {each.name: call_format(each) for each in (MARKED, LISTED, SINGLE)}
NAMES = frozenset({"f", "g"})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>"}}\n</tool_call>'
MADE = ToolCall("f", '{"a": "}</tool_call>"}')
TWO = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1]}}]'
ANSWERS = [
    ("marked", CALL, "", [MADE]),
    ("marked", f"I look.\n{CALL}\n{CALL}\n", "I look.", [MADE, MADE]),
    ("marked", CALL.replace("\n", ""), "", [MADE]),
    ("marked", f"{CALL} and more", " and more", [MADE]),
    ("marked", "a < b <tool", "a < b <tool", []),
    ("marked", CALL[:-3], CALL[:-3], []),
    ("marked", CALL.replace('"f"', '"h"'), CALL.replace('"f"', '"h"'), []),
    ("marked", f"<tool_call> {CALL}", "<tool_call>", [MADE]),
    ("marked", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ("listed", TWO, "", [ToolCall("f", "{}"), ToolCall("g", '{"b": [1]}')]),
    ("listed", TWO[:-1], TWO[:-1], []),
    ("single", '{"name": "g", "parameters": {"b": 1}}', "", [ToolCall("g", '{"b": 1}')]),
    ("single", ' {"name": "Ann"} ', ' {"name": "Ann"} ', []),
]  # fmt: skip


def read(form: CallFormat, parts: list[str]) -> tuple[str, list[ToolCall]]:
    reader = CallReader(form, NAMES)
    found = [*(reader.add(part) for part in parts), reader.end()]
    return "".join(each.text for each in found), [call for each in found for call in each.calls]


@pytest.mark.parametrize(("name", "answer", "text", "calls"), ANSWERS)
def test_an_answer_has_text_and_calls(
    name: str, answer: str, text: str, calls: list[ToolCall]
) -> None:
    assert read(FORMS[name], [answer]) == (text, calls)


@examples(100)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 150), max_size=12))
def test_text_and_calls_do_not_depend_on_how_an_answer_is_cut(
    case: tuple[str, str, str, list[ToolCall]], cuts: list[int]
) -> None:
    name, answer, text, calls = case
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parts = [answer[start:end] for start, end in pairwise(places)]
    assert read(FORMS[name], parts) == (text, calls)


def test_text_that_cannot_be_a_call_is_given_away_at_once() -> None:
    reader = CallReader(FORMS["marked"], NAMES)
    assert reader.add("I think <b").text == "I think <b"
    assert reader.add("> so <tool").text == "> so"
    assert reader.add("box>").text == " <toolbox>"
