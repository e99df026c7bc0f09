"""YAML by the core schema of YAML 1.2, and back."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.files.yaml_text import YamlError, parse_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-8", 1e-8),
        ("3.0e8", 3e8),
        (".5", 0.5),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("-3", -3),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("TRUE", True),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'1e-8'", "1e-8"),
        ("969, 30, 1", "969, 30, 1"),
        ("[1, [a, 2.5]]", [1, ["a", 2.5]]),
    ],
)
def test_scalars_are_those_of_the_core_schema(text: str, value: object) -> None:
    read, _ = parse_yaml(f"key: {text}")
    assert read == {"key": value}
    assert isinstance(read, dict)
    assert type(read["key"]) is type(value)


def test_the_line_of_each_key_is_known() -> None:
    _, lines = parse_yaml("# heads\nmodel:\n  num_layers: 2\n\n  hidden_size: 8\nseed: 1\n")
    assert lines == {
        ("model",): 2, ("model", "num_layers"): 3, ("model", "hidden_size"): 5, ("seed",): 6,
    }  # fmt: skip


# Each line has nine times the values of the one before.
ALIASES = "a0: &a0 [x]\n" + "\n".join(
    f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 7)
)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\n\tb: 2", 2, "a tab stands before a key"),
        ("a: 1\nb:\n\t- 2", 3, "a tab stands before a key"),
        ("a: 1\nb: 2\na: 3", 3, "a stands twice, in line 1 and"),
        ("m:\n  a: 1\n  'a': 2", 3, "a stands twice, in line 2 and"),
        ("a: &x [1, *x]", 1, "a value contains itself"),
        ("1: a", 1, "a key is no name: 1"),
        ("a: b: c", 1, "mapping values are not allowed here"),
        ("a: [1, 2", 1, "while parsing a flow sequence"),
        ("a: 1\n---\nb: 2", 2, "expected a single document"),
        ("a: !!python/name:os.system", 1, "could not determine a constructor"),
        ("a: !!timestamp 2024-01-01", 1, "a value is a date"),
        ("a: !!int x", 1, "invalid literal"),
        ("a: \x07", None, "special characters are not allowed"),
        ("{a: " * 1000, None, "values lie too deep in each other"),
        (ALIASES, 1, "more than 50,000 values, up to"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, line: int | None, problem: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert problem in caught.value.problem
    assert caught.value.line == line
    assert caught.value.fix


def test_an_anchor_is_what_it_stands_for() -> None:
    assert parse_yaml("a: &x [1]\nb: *x")[0] == {"a": [1], "b": [1]}


def test_an_empty_text_has_no_keys() -> None:
    assert parse_yaml("# nothing\n") == ({}, {})


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.sampled_from(["1e-8", "no", "010", "1:30", "~", "", "true", "=", "<<", "2024-01-01"])
)  # fmt: skip
_VALUES = st.dictionaries(
    st.text(min_size=1), _SCALARS | st.lists(_SCALARS) | st.dictionaries(st.text(), _SCALARS)
)


@given(_VALUES)
def test_what_is_written_is_read_back_here_and_by_readers_of_yaml_1_1(values: object) -> None:
    assert isinstance(values, dict)
    text = to_yaml(values)
    assert parse_yaml(text)[0] == values
    assert yaml.safe_load(text) == values


def test_numbers_without_end_are_written_too() -> None:
    assert parse_yaml(to_yaml({"a": math.inf}))[0] == {"a": math.inf}
