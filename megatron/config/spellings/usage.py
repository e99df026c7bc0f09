"""Flags written as in a usage line (`--profile --seed N --names N... --rl-*`).

A word after a flag says how many values follow it; a star stands for every flag with that prefix.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TypeVar

Answer = TypeVar("Answer")


class Values(Enum):
    """How many values follow a flag, as a usage line writes it."""

    NONE = ""
    ONE = "N"
    MANY = "N..."  # all words up to the next flag


def flags_of(usage: str) -> Iterator[tuple[str, Values]]:
    """Yield each flag of a usage line, with the values that follow it."""
    words = usage.split()
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word, Values.NONE if following.startswith("--") else Values(following)


def take_values(values: Values, rest: list[str]) -> list[str]:
    """Remove the values of a flag from `rest`, the words that follow it, and return them."""
    up_to = next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))
    taken = {Values.NONE: 0, Values.ONE: min(1, up_to), Values.MANY: up_to}[values]
    given = rest[:taken]
    del rest[:taken]
    return given


def look_up(table: Mapping[str, Answer], word: str) -> Answer | None:
    """Return what `table` says of a flag: under its name, or under a prefix that ends in a star."""
    if word in table:
        return table[word]
    families = (name for name in table if name.endswith("*") and word.startswith(name[:-1]))
    family = max(families, key=len, default=None)
    return None if family is None else table[family]
