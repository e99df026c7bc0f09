"""Every flag without effect is accepted and said, with its reason."""

import pytest

from megatron.arguments import parse_args
from megatron.config.spellings.no_effect import NO_EFFECT, Ignored
from megatron.config.spellings.usage import Values
from tests.support.output import without_times
from tests.unit.config.groups import COMMAND, a_run, problems_of


def words_of(flag: str, ignored: Ignored) -> list[str]:
    """A use of the flag that has no effect; of a family, one of its members."""
    values = {Values.NONE: [], Values.ONE: ["1"], Values.MANY: ["1", "2"]}[ignored.values]
    return [flag.replace("*", "x"), *(ignored.only[:1] or values)]


def test_flags_without_effect_change_nothing_and_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    uses = [(words_of(flag, ignored), ignored) for flag, ignored in NO_EFFECT.items()]
    assert parse_args([*(word for words, _ in uses for word in words), *COMMAND]) == a_run()
    assert without_times(capsys.readouterr().out).splitlines() == [
        f"{' '.join(words)}: accepted, has no effect here because {ignored.because}"
        for words, ignored in uses
    ]


@pytest.mark.parametrize("flag", [flag for flag, ignored in NO_EFFECT.items() if ignored.only])
@pytest.mark.parametrize("values", [["8"], []])
def test_a_value_that_asks_for_a_missing_feature_is_refused(flag: str, values: list[str]) -> None:
    (error,) = problems_of(flag, *values)
    assert error.problem == "this value is of a feature that this version does not have"
    assert error.found == " ".join([flag, *values])
    assert error.fix.startswith(f"use {flag} {NO_EFFECT[flag].only[0]}")
    assert error.fix.endswith(f", or leave it out: {NO_EFFECT[flag].because}")
