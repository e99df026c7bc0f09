"""A command line of another program becomes the one of ours, word by word."""

import pytest

from megatron.arguments import CommandLineError
from megatron.errors import ConfigError
from tools.other_programs.words import Option, OtherProgram, Translation, translated

PROGRAM = OtherProgram(
    "tools.ours",
    "an example",
    {
        "--in": Option(("--load",)),
        "--here": Option(()),
        "--pair": Option(("--two", "x"), num_values=2),
        "--quiet": Option(num_values=0, because="it always is"),
        "--threads": Option(because="there is one"),
    },
    first=("--format", "f"),
)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("", ""),
        ("--in a --other b c", "--load a --other b c"),
        ("--in=a --other=b", "--load a --other=b"),
        ("--here a", "a"),
        ("--pair 1 2 3", "--two x 1 2 3"),
        ("free --quiet --in a", "free --load a"),
        ("--threads 4 --in a", "--load a"),
    ],
)
def test_flags_are_spelled_as_ours_and_others_passed_on(given: str, ours: str) -> None:
    assert translated(PROGRAM, given.split()).words == ["--format", "f", *ours.split()]


def test_what_has_no_effect_is_said() -> None:
    notes = translated(PROGRAM, ["--quiet", "--threads", "4"]).notes
    assert notes == [
        "--quiet: accepted, has no effect here because it always is",
        "--threads 4: accepted, has no effect here because there is one",
    ]


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a flag lacks its value") as caught:
        translated(PROGRAM, ["--pair", "1"])
    assert caught.value.found == "--pair"


def test_defaults_are_added_last() -> None:
    program = PROGRAM._replace(completed=lambda words: [*words, "--end"])
    assert translated(program, ["--in", "a"]).words == ["--format", "f", "--load", "a", "--end"]


def test_flags_of_a_run_are_left_out_where_a_checkpoint_records_them() -> None:
    program = PROGRAM._replace(keeps=("--save", "--no-optim"))
    given = ["--num-layers", "2", "--in", "a", "--save", "b", "--swiglu", "--no-optim", "--fp16"]
    assert translated(program, given) == Translation(
        ["--format", "f", "--load", "a", "--save", "b", "--no-optim"],
        ["--num-layers 2 --swiglu --fp16: not needed, as the checkpoint records its model"],
    )
    with pytest.raises(CommandLineError, match="--num-layrs"):
        translated(program, ["--num-layrs", "2"])
