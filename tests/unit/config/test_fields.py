"""A flag is declared once, as a field: what argparse makes of it, and the errors of mistakes."""

import argparse
import copy
import enum
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.fields import (
    FieldsError,
    add_flags,
    check_field,
    default_of,
    field_names,
    flag,
    flag_name,
    from_flags,
    from_plain,
    is_number,
    raise_all,
    to_plain,
)
from megatron.errors import ConfigError


class Colour(enum.StrEnum):
    """Two values, one of which has an older name."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A group with a field of every kind."""

    count: int = flag(help="how many")
    rate: float = flag(0.5, help="how often, 0 to 100%", aliases=("--frequency",))
    name: str | None = flag(None, help="what it is called")
    colour: Colour = flag(Colour.RED, help="how it looks", values={"azure": "blue"})
    sizes: tuple[int, ...] | None = flag(None, help="how large")
    quick: bool = flag(True, help="whether it is fast", off=("--slow",))
    careful: bool = flag(False, help="whether it looks first")


def parse(*words: str) -> Example:
    problems: list[ConfigError] = []
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, "example", Example, problems)
    parsed = vars(parser.parse_args(words))
    raise_all(iter(problems))
    return from_flags(Example, parsed)


def test_a_field_is_a_flag_of_its_name() -> None:
    assert flag_name("hidden_size") == "--hidden-size"
    assert field_names(Example)[:2] == ("count", "rate")


def test_values_have_the_type_of_their_field() -> None:
    got = parse("--count", "3", "--rate", "1e-3", "--name", "x", "--sizes", "1", "2")
    assert got == Example(count=3, rate=1e-3, name="x", sizes=(1, 2))


def test_defaults_stay_with_the_dataclass() -> None:
    assert parse("--count", "3") == Example(count=3)


def test_an_alias_and_an_older_value_mean_the_same() -> None:
    assert parse("--count", "1", "--frequency", "2").rate == 2
    assert parse("--count", "1", "--colour", "azure").colour is Colour.BLUE


@pytest.mark.parametrize(
    ("words", "quick", "careful"),
    [
        ((), True, False),
        (("--careful",), True, True),
        (("--careful", "true"), True, True),
        (("--careful", "False"), True, False),
        (("--no-quick",), False, False),
        (("--slow",), False, False),
        (("--quick", "false"), False, False),
        (("--no-quick", "--quick"), True, False),
    ],
)
def test_a_switch_is_named_or_told_true_or_false(
    words: tuple[str, ...], quick: bool, careful: bool
) -> None:
    got = parse("--count", "1", *words)
    assert (got.quick, got.careful) == (quick, careful)


@pytest.mark.parametrize(
    ("words", "found", "fix"),
    [
        (("--count", "many"), "--count many", "give a whole number"),
        (("--count", "1.5"), "--count 1.5", "give a whole number"),
        (("--count", "1", "--rate", "often"), "--rate often", "give a number"),
        (("--count", "1", "--colour", "green"), "--colour green", "give one of red, blue"),
        (("--count", "1", "--sizes", "big"), "--sizes big", "give a whole number"),
        (("--count", "1", "--quick", "yes"), "--quick yes", "give true or false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_said_with_what_fits(
    words: tuple[str, ...], found: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match="a value of the wrong kind") as caught:
        parse(*words)
    assert (caught.value.found, caught.value.fix) == (found, fix)


def test_wrong_values_are_all_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        parse("--count", "many", "--rate", "often")
    assert [error.found for error in caught.value.errors] == ["--count many", "--rate often"]


def test_a_missing_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="a required flag is missing") as caught:
        parse("--rate", "1")
    assert caught.value.found == "no --count"
    assert caught.value.fix == "add --count <value>"


def test_help_shows_the_default_and_how_to_turn_it_off() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, "example", Example, [])
    text = " ".join(parser.format_help().split())
    assert "how many [required]" in text
    assert "how often, 0 to 100% [0.5]" in text
    assert "what it is called [not set]" in text
    assert "how it looks [red]" in text
    assert "whether it is fast [on; --no-quick turns it off]" in text
    assert "whether it looks first [off]" in text


@given(
    st.builds(
        Example,
        count=st.integers(),
        rate=st.floats(allow_nan=False),
        name=st.none() | st.text(),
        colour=st.sampled_from(Colour),
        sizes=st.none() | st.lists(st.integers()).map(tuple),
        quick=st.booleans(),
        careful=st.booleans(),
    )
)
def test_a_group_survives_plain_values(group: Example) -> None:
    assert from_plain(Example, to_plain(group)) == group


def test_plain_values_with_a_strange_name_are_an_error() -> None:
    with pytest.raises(ConfigError, match="a stored Example holds fields") as caught:
        from_plain(Example, {"count": 1, "weight": 2, "age": 3})
    assert caught.value.found == "age, weight"


def test_a_stored_value_that_a_field_cannot_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a stored Example holds a value") as caught:
        from_plain(Example, {"count": 1, "colour": "green"})
    assert caught.value.found == "colour: 'green'"
    with pytest.raises(ConfigError, match="a stored Example holds a value"):
        from_plain(Example, {"count": 1, "sizes": 3})


def test_a_stored_group_without_a_required_field_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a stored Example lacks fields") as caught:
        from_plain(Example, {"rate": 1.0})
    assert caught.value.found == "no count"


def test_a_flag_that_an_older_version_did_not_have_takes_its_default() -> None:
    assert from_plain(Example, {"count": 1}) == Example(count=1)
    assert default_of(Example, "rate") == 0.5


def test_a_condition_that_holds_yields_nothing() -> None:
    assert list(check_field(True, "a_b", 1, problem="p", fix="f")) == []
    (error,) = check_field(False, "a_b", 1, problem="p", fix="f")
    assert error.found == "--a-b 1"


def test_one_problem_is_raised_as_itself_and_several_as_one() -> None:
    one, other = ConfigError("first", fix="a"), ConfigError("second", fix="b")
    raise_all(iter(()))
    with pytest.raises(ConfigError, match="first") as caught:
        raise_all(iter([one]))
    assert caught.value is one
    with pytest.raises(FieldsError, match="first") as several:
        raise_all(iter([one, other]))
    assert several.value.errors == (one, other)


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_several_problems_survive_the_way_between_processes(again: Any) -> None:
    error = FieldsError([ConfigError("first", fix="a"), ConfigError("second", found=2, fix="b")])
    assert str(again(error)) == str(error)
    assert len(again(error).errors) == 2


@pytest.mark.parametrize(
    ("word", "expected"), [("0.3", True), ("-1e3", True), ("1_text", False), ("", False)]
)
def test_a_word_is_a_number_or_not(word: str, expected: bool) -> None:
    assert is_number(word) is expected
