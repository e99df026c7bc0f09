"""Groups of weighted ranges: their values, and each way of writing them wrong."""

from pathlib import Path

import pytest

from megatron import log
from megatron.data.corpus.weighted_paths import (
    WeightedGroup,
    WeightedRange,
    WeightedSplits,
    announce_overlaps,
    parse_weighted_groups,
    read_weighted_file,
    weighted_problems,
    weighted_splits,
)
from megatron.errors import ConfigError
from tests.unit.config.groups import some_data

FLAG = "--valid-weighted-split-paths"


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())


def weighted_data(**paths):
    named = {f"{use}_weighted_split_paths": value for use, value in paths.items()}
    return some_data(data_path=None, **named)


def test_a_group_is_a_name_and_ranges_of_corpora():
    groups = parse_weighted_groups(
        ("VALID1: 1 0.95:0.98 /a/b c, 0.3 0.90:0.99 d", "V-2.x:2 0:1 e:f"), flag=FLAG
    )
    assert groups == (
        ("VALID1", ((1.0, 0.95, 0.98, "/a/b c"), (0.3, 0.90, 0.99, "d"))),
        ("V-2.x", ((2.0, 0.0, 1.0, "e:f"),)),
    )


@pytest.mark.parametrize(
    ("count", "expected"), [(1000, (250, 750)), (10, (2, 8)), (2, (0, 2)), (1, (0, 1))]
)
def test_borders_of_a_range_are_rounded_half_to_even(count, expected):
    assert WeightedRange(1.0, 0.25, 0.75, "p").items(count) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("no colon", "it is not a name, a colon and corpora"),
        ("A:", "it is not a name, a colon and corpora"),
        ("A/B: 1 0:1 p", "a name that cannot stand in a file name"),
        (": 1 0:1 p", "a name that cannot stand in a file name"),
        ("A: 1 0:1", "a corpus is not a weight, a range and a prefix"),
        ("A: 1 0:1 p,", "a corpus is not a weight, a range and a prefix"),
        ("A: x 0:1 p", "the weight is not a number"),
        ("A: nan 0:1 p", "the weight is not finite"),
        ("A: 0 0:1 p", "a weight of a group is not above zero"),
        ("A: -1 0:1 p", "a weight of a group is not above zero"),
        ("A: 1 0.5 p", "a range is not START:END"),
        ("A: 1 0:0.5:1 p", "a range is not START:END"),
        ("A: 1 a:1 p", "the start of the range is not a number"),
        ("A: 1 0:b p", "the end of the range is not a number"),
        ("A: 1 -0.1:1 p", r"a range of a corpus is outside \[0, 1\]"),
        ("A: 1 0:1.1 p", r"a range of a corpus is outside \[0, 1\]"),
        ("A: 1 0.5:0.2 p", "ends before it starts"),
        ("A: 1 0.5:0.5 p", "ends before it starts, or where it starts"),
    ],
)
def test_each_mistake_has_its_own_message(word, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_weighted_groups((word,), flag=FLAG)
    assert FLAG in str(raised.value)


def test_names_of_groups_are_their_own():
    with pytest.raises(ConfigError, match="two groups of weighted paths have the same name"):
        parse_weighted_groups(("A: 1 0:1 p", "A: 1 0:1 q"), flag=FLAG)


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_file_holds_one_line_of_quoted_groups(tmp_path: Path, end):
    path = tmp_path / "paths.txt"
    path.write_text('"A: 1 0:1 p, 2 0:1 q" "B: 1 0:1 p"' + end)
    assert read_weighted_file(str(path), flag=FLAG) == ("A: 1 0:1 p, 2 0:1 q", "B: 1 0:1 p")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "is not exactly one line"),
        (b'"A: 1 0:1 p"\n"B: 1 0:1 p"\n', "is not exactly one line"),
        (b"A: 1 0:1 p\n", "not each in double quotes"),
        (b'"A: 1 0:1 p" B: 1 0:1 p\n', "not each in double quotes"),
        (b'"A: 1 0:1 p""B: 1 0:1 p"\n', "not each in double quotes"),
    ],
)
def test_each_mistake_of_a_file_has_its_own_message(tmp_path: Path, content, message):
    path = tmp_path / "paths.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_weighted_file(str(path), flag="--train-weighted-split-paths-path")
    assert str(path) in str(raised.value)


def test_flags_and_files_give_the_same_splits(tmp_path: Path):
    assert weighted_splits(some_data()) is None
    assert list(weighted_problems(some_data())) == []
    path = tmp_path / "valid.txt"
    path.write_text('"V: 1 0.5:1 p"')
    splits = weighted_splits(weighted_data(train=("T: 1 0:0.5 p, 2 0:1 q",)))
    assert splits == (
        (("T", ((1.0, 0.0, 0.5, "p"), (2.0, 0.0, 1.0, "q"))),),
        (),
        (),
    )
    assert splits.prefixes == ("p", "q")
    with_file = some_data(
        data_path=None,
        train_weighted_split_paths=("T: 1 0:0.5 p",),
        valid_weighted_split_paths_path=str(path),
    )
    assert weighted_splits(with_file).valid == (WeightedGroup("V", ((1.0, 0.5, 1.0, "p"),)),)


def test_training_has_one_group_and_names_differ_over_uses():
    several = weighted_data(
        train=("T: 1 0:0.5 p", "U: 1 0:0.5 p"), valid=("V: 1 0:1 p",), test=("V: 1 0:1 p",)
    )
    messages = [str(problem) for problem in weighted_problems(several)]
    assert "training takes exactly one group of weighted paths" in messages[0]
    assert "T, U" in messages[0]
    assert "could not be distinguished" in messages[1]
    with pytest.raises(ConfigError, match="training takes exactly one group"):
        weighted_splits(several)


def test_mistakes_of_all_uses_are_said_together():
    bad = weighted_data(train=("T",), valid=("V: 1 2:3 p",), test=("X: 1 0:1 p",))
    assert len(list(weighted_problems(bad))) == 2


def test_items_that_training_shares_with_validation_are_announced(capsys):
    train = WeightedGroup("T", (WeightedRange(1.0, 0.0, 0.95, "p"),))
    apart = WeightedGroup("V", (WeightedRange(1.0, 0.95, 1.0, "p"),))
    other = WeightedGroup("W", (WeightedRange(1.0, 0.0, 0.95, "q"),))
    shared = WeightedGroup("X", (WeightedRange(1.0, 0.9, 1.0, "p"),))
    announce_overlaps(WeightedSplits((train,), (apart, other), ()))
    assert capsys.readouterr().err == ""
    announce_overlaps(WeightedSplits((train,), (apart,), (shared,)))
    assert "the group X shares 0.9:0.95 of p with training" in capsys.readouterr().err
