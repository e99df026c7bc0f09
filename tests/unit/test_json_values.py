"""JSON is read strictly, and objects inside it as copies."""

import math

import pytest

from megatron.json_values import object_at, parse_json


def test_an_object_is_a_copy() -> None:
    values = {"zero": {"stage": 1}}
    found = object_at(values, "zero")
    found["stage"] = 2
    assert values == {"zero": {"stage": 1}}
    assert found == {"stage": 2}


@pytest.mark.parametrize("values", [{}, {"zero": None}, {"zero": [1]}, {"zero": "auto"}])
def test_something_else_than_an_object_is_empty(values: dict[str, object]) -> None:
    assert object_at(values, "zero") == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"b": {"a": 1, "a": 1}}', "a: named twice in one object"),
        ('{"b": 1, "a": 1, "b": 2, "a": 1}', "a, b: named twice"),
        ("[-Infinity]", "-Infinity is no number of JSON"),
        ("[1 2]", "line 1 column 4"),
    ],
)
def test_what_json_does_not_have_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_json(text)


def test_constants_of_python_are_read_where_they_are_allowed() -> None:
    assert parse_json(b'{"limit": [0.0, Infinity]}', constants=True) == {"limit": [0.0, math.inf]}
