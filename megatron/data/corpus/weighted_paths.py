"""Named mixtures of ranges of corpora, as given with `--train-weighted-split-paths`.

A group is written `NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX`. What a reader would get
wrong: START and END are shares of the *items* of a corpus, rounded half to even, and only the user
keeps the ranges of training and validation disjoint, so an overlap is logged.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron import log
from megatron.config.data import DataConfig
from megatron.errors import ConfigError, MegatronError

_FORM = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX"'
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


class WeightedRange(NamedTuple):
    """A part of one corpus in a mixture: its items from share `start` up to share `end`."""

    weight: float
    start: float
    end: float
    prefix: str

    def items(self, count: int) -> tuple[int, int]:
        """Return the first item, and the one after the last, of a corpus of `count` items."""
        return round(self.start * count), round(self.end * count)


class WeightedGroup(NamedTuple):
    """A mixture under a name, which appears in the log and in TensorBoard."""

    name: str
    ranges: tuple[WeightedRange, ...]


class WeightedSplits(NamedTuple):
    """The groups for each use; none where a use is turned off. Training has exactly one."""

    train: tuple[WeightedGroup, ...]
    valid: tuple[WeightedGroup, ...]
    test: tuple[WeightedGroup, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Every named corpus, once."""
        groups = (*self.train, *self.valid, *self.test)
        return tuple(dict.fromkeys(part.prefix for group in groups for part in group.ranges))


def weighted_splits(data: DataConfig) -> WeightedSplits | None:
    """Return the groups of the weighted-split flags, or None if none of them is given.

    Raises:
        ConfigError: the first problem; `weighted_problems` yields all.
    """
    for problem in weighted_problems(data):
        raise problem
    return _read(data) if data.has_weighted_splits else None


def weighted_problems(data: DataConfig) -> Iterator[MegatronError]:
    """Yield all errors in the weighted-split flags, without opening a corpus."""
    if not data.has_weighted_splits:
        return
    failed = False
    for texts in _texts(data):
        try:
            _groups_of(texts)
        except ConfigError as error:
            failed = True
            yield error
    if failed:
        return
    splits = _read(data)
    if len(splits.train) != 1:
        yield ConfigError(
            "training takes exactly one group of weighted paths",
            found="--train-weighted-split-paths with the groups "
            + ", ".join(group.name for group in splits.train),
            fix="write all corpora of training into one group, separated by commas",
        )
    names = [group.name for group in (*splits.valid, *splits.test)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ConfigError(
            "two groups of weighted paths have the same name, so that their losses could not be "
            "distinguished",
            found=f"{name} in --valid-weighted-split-paths and --test-weighted-split-paths",
            fix=f"give each its own name, such as {name}-valid and {name}-test",
        )


def parse_weighted_groups(words: Sequence[str], *, flag: str) -> tuple[WeightedGroup, ...]:
    """Return the groups that the values of `flag` describe; raises ConfigError."""
    groups = tuple(_parse_group(word, flag) for word in words)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "two groups of weighted paths have the same name",
                found=f"{flag} with {name} {names.count(name)} times",
                fix="give each group its own name",
            )
    return groups


def read_weighted_file(path: str, *, flag: str) -> tuple[str, ...]:
    """Return the groups in a file of one line, each in double quotes; raises ConfigError.

    A final newline may be missing, unlike in Megatron-DeepSpeed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            "a file of weighted paths cannot be read",
            found=f"{flag} {path}: {why}",
            fix="check the path, which every rank must see",
        ) from error
    lines = [line.strip() for line in lines if line.strip()]
    if len(lines) != 1:
        raise ConfigError(
            "a file of weighted paths is not exactly one line",
            found=f"{flag} {path} with {len(lines)} lines",
            fix=f"write all groups on one line, each in double quotes: {_FORM} {_FORM}",
        )
    line = lines[0]
    if not re.fullmatch(r'"[^"]*"(\s+"[^"]*")*', line):
        raise ConfigError(
            "the groups in a file of weighted paths are not each in double quotes",
            found=f"{flag} {path}: {line}",
            fix=f"write {_FORM} {_FORM}",
        )
    return tuple(re.findall(r'"([^"]*)"', line))


def announce_overlaps(splits: WeightedSplits) -> None:
    """Warn of items that training shares with validation or test."""
    trained = [part for group in splits.train for part in group.ranges]
    for group in (*splits.valid, *splits.test):
        for one, other in product(trained, group.ranges):
            start, end = max(one.start, other.start), min(one.end, other.end)
            if one.prefix == other.prefix and start < end:
                log.warning_once(
                    f"weighted overlap {group.name} {other}",
                    f"the group {group.name} shares {start:g}:{end:g} of {one.prefix} with "
                    "training; its loss is partly one of training data",
                )


def _read(data: DataConfig) -> WeightedSplits:
    return WeightedSplits(*(_groups_of(texts) for texts in _texts(data)))


class _Texts(NamedTuple):
    """The values of the two flags of one use, of which at most one is given."""

    use: str
    words: tuple[str, ...] | None
    path: str | None


def _texts(data: DataConfig) -> tuple[_Texts, ...]:
    return (
        _Texts("train", data.train_weighted_split_paths, data.train_weighted_split_paths_path),
        _Texts("valid", data.valid_weighted_split_paths, data.valid_weighted_split_paths_path),
        _Texts("test", data.test_weighted_split_paths, data.test_weighted_split_paths_path),
    )


def _groups_of(texts: _Texts) -> tuple[WeightedGroup, ...]:
    flag, words = f"--{texts.use}-weighted-split-paths", texts.words or ()
    if texts.path is not None:
        flag += "-path"
        words = read_weighted_file(texts.path, flag=flag)
    return parse_weighted_groups(words, flag=flag)


def _parse_group(word: str, flag: str) -> WeightedGroup:
    name, colon, rest = word.partition(":")
    name = name.strip()
    if not colon or not rest.strip():
        raise _unreadable("it is not a name, a colon and corpora", word, flag)
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "a group of weighted paths has a name that cannot stand in a file name",
            found=f"{flag} {word!r}: the name {name!r}",
            fix="use letters, digits, _, ., + and -, as in VALID1: ...",
        )
    return WeightedGroup(
        name, tuple(_parse_range(part.strip(), name, flag) for part in rest.split(","))
    )


def _parse_range(text: str, name: str, flag: str) -> WeightedRange:
    shown = f"{name}: {text}"
    words = text.split(maxsplit=2)
    if len(words) != 3:
        raise _unreadable("a corpus is not a weight, a range and a prefix", shown, flag)
    weight = _number(words[0], "the weight", shown, flag)
    if weight <= 0:
        raise ConfigError(
            "a weight of a group is not above zero",
            found=f"{flag} {shown}",
            fix="use a weight above zero, or leave the corpus out",
        )
    bounds = words[1].split(":")
    if len(bounds) != 2:
        raise _unreadable("a range is not START:END", shown, flag)
    start = _number(bounds[0], "the start of the range", shown, flag)
    end = _number(bounds[1], "the end of the range", shown, flag)
    if not (0 <= start <= 1 and 0 <= end <= 1):
        raise ConfigError(
            "a range of a corpus is outside [0, 1]",
            found=f"{flag} {shown}",
            fix="write shares of the corpus, such as 0:0.95",
        )
    if start >= end:
        raise ConfigError(
            "a range of a corpus ends before it starts, or where it starts",
            found=f"{flag} {shown}",
            fix=f"write the smaller number first: {end:g}:{start:g}"
            if start > end
            else "make the range larger, or leave the corpus out",
        )
    return WeightedRange(weight, start, end, words[2])


def _number(word: str, what: str, shown: str, flag: str) -> float:
    try:
        value = float(word)
    except ValueError as error:
        raise _unreadable(f"{what} is not a number", shown, flag) from error
    if not math.isfinite(value):
        raise _unreadable(f"{what} is not finite", shown, flag)
    return value


def _unreadable(why: str, shown: str, flag: str) -> ConfigError:
    return ConfigError(
        f"a group of weighted paths cannot be read: {why}",
        found=f"{flag} {shown!r}",
        fix=f"write {flag.removesuffix('-path')} {_FORM}",
    )
