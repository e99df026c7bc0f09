"""Every flag in the tables of other Megatrons' spellings does what its table says."""

import pytest

from megatron.arguments import parse_args
from megatron.config.spellings import ALIASES, NO_EFFECT, NOT_YET, REMOVED
from tests.support.output import without_times
from tests.unit.config.groups import COMMAND, a_run, problems_of


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_taken(alias: str) -> None:
    wants_value = len(ALIASES[alias]) % 2 == 1
    value = "uniform" if ALIASES[alias][-1] == "--recompute-method" else "7"
    command = [word for word in COMMAND if word not in ("--data-path", "corpus")]
    command += [] if alias == "--train-data" else ["--data-path", "corpus"]
    if alias == "--partition-activations":  # of layers that are recomputed
        command.append("--checkpoint-activations")
    config = parse_args([*command, alias, *([value] if wants_value else [])])
    assert config != a_run()


@pytest.mark.parametrize("word", NO_EFFECT)
def test_a_flag_without_effect_is_taken_and_said(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [NO_EFFECT[word].only or "1"] * abs(NO_EFFECT[word].values)
    assert parse_args([word, *values, *COMMAND]) == a_run()
    output = without_times(capsys.readouterr().out)
    assert output.startswith(f"{' '.join([word, *values])}: accepted, has no effect here because ")
    assert NO_EFFECT[word].because in output


@pytest.mark.parametrize("word", [word for word, flag in NO_EFFECT.items() if flag.only])
def test_a_value_that_asks_for_a_missing_feature_is_refused(word: str) -> None:
    (error,) = problems_of(word, "8")
    assert error.problem == "this flag is of a feature that this version does not have"
    assert error.found == f"{word} 8"
    assert error.fix == f"use {word} {NO_EFFECT[word].only}, or leave it out"


@pytest.mark.parametrize("word", REMOVED)
def test_a_flag_removed_long_ago_names_its_successor(word: str) -> None:
    (error,) = problems_of(word, "8")
    assert error.problem == "this flag was removed long ago"
    assert error.fix == f"use {REMOVED[word]}"


@pytest.mark.parametrize("word", NOT_YET)
def test_a_flag_of_a_missing_feature_says_what_to_use(word: str) -> None:
    (error,) = problems_of(word, "a", "b")
    assert error.problem == "this flag is of a feature that this version does not have"
    assert (error.found, error.fix) == (word, f"use {NOT_YET[word]}")
