"""Objects inside JSON are read as copies."""

import pytest

from megatron.json_values import object_at


def test_an_object_is_a_copy() -> None:
    values = {"zero": {"stage": 1}}
    found = object_at(values, "zero")
    found["stage"] = 2
    assert values == {"zero": {"stage": 1}}
    assert found == {"stage": 2}


@pytest.mark.parametrize("values", [{}, {"zero": None}, {"zero": [1]}, {"zero": "auto"}])
def test_something_else_than_an_object_is_empty(values: dict[str, object]) -> None:
    assert object_at(values, "zero") == {}
