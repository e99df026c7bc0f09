"""Flags of missing features are refused by name, and every flag of other Megatrons is answered."""

from collections import Counter

import pytest

from megatron.arguments import CommandLineError, parse_given
from megatron.config.spellings.no_effect import WITHOUT_EFFECT
from megatron.config.spellings.refused import REFUSALS, REFUSED, REMOVED, take_one_value
from megatron.config.spellings.usage import flags_of
from tests.unit.config.groups import problems_of
from tests.unit.config.spellings.flags_of_other_megatrons import BIGSCIENCE, MEGATRON_LM, MICROSOFT

# What a flag gets that no table and no field names.
GUESSES = ("there is no such flag", "a word on the command line belongs to no flag")


def test_a_flag_removed_long_ago_names_its_successor() -> None:
    for flag, successor in REMOVED.items():
        (error,) = problems_of(flag, "8")
        assert error.problem == "this flag was removed long ago"
        assert error.fix == f"use {successor}"


def test_a_flag_of_a_missing_feature_says_which_and_what_to_use() -> None:
    flags = {flag.replace("*", "x"): refused for flag, refused in REFUSED.items()}
    errors = problems_of(*(word for flag in flags for word in (flag, "a", "b")))
    assert [(error.problem, error.found, error.fix) for error in errors] == [
        (
            "this flag is of a feature that this version does not have: " + refused.feature,
            flag,
            f"use {refused.instead}",
        )
        for flag, refused in flags.items()
    ]


@pytest.mark.parametrize("command", [BIGSCIENCE, MICROSOFT, MEGATRON_LM])
def test_every_flag_of_other_megatrons_is_answered_by_name(command: str) -> None:
    with pytest.raises(CommandLineError) as caught:
        parse_given(command.split())
    errors = [finding.error for finding in caught.value.findings]
    assert [error.found for error in errors if error.problem.startswith(GUESSES)] == []


def test_no_flag_stands_in_two_groups_of_a_table() -> None:
    for usages in ([one.usage for one in WITHOUT_EFFECT], [one.flags for one in REFUSALS]):
        names = Counter(flag for usage in usages for flag, _ in flags_of(usage))
        assert [name for name, count in names.items() if count > 1] == []


def test_flags_of_one_feature_have_one_group() -> None:
    features = Counter(refused.feature for refused in REFUSALS)
    assert [feature for feature, count in features.items() if count > 1] == []


def test_several_values_where_one_is_taken_name_the_missing_feature() -> None:
    rest = ["64", "64", "128", "--bf16"]
    (error,) = take_one_value("--num-experts", rest)
    assert error.problem.endswith("does not have: a number of experts for each layer")
    assert error.found == "--num-experts 64 64 128"
    assert error.fix == "use one value, such as --num-experts 64"
    assert rest == ["64", "--bf16"]


@pytest.mark.parametrize(
    ("word", "rest"),
    [("--num-experts", ["4", "--x"]), ("--num-experts", []), ("--other", ["1", "2"])],
)
def test_one_value_stays_as_it_is(word: str, rest: list[str]) -> None:
    before = list(rest)
    assert take_one_value(word, rest) == []
    assert rest == before
