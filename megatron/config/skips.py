"""Iterations whose data are skipped without training, as ranges of iteration numbers."""

import re
from collections.abc import Iterator, Sequence

from megatron.errors import ConfigError

_RANGE = re.compile(r"(\d+)-(\d+)")


def skip_problems(words: Sequence[str]) -> Iterator[ConfigError]:
    """Yield the errors in `--skip-train-iteration-range`."""
    for word in words:
        match = _RANGE.fullmatch(word)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            yield ConfigError(
                "a range of iterations to skip is not two numbers from 1, the smaller one first",
                found=f"--skip-train-iteration-range {word}",
                fix="give ranges such as 100-120 200-200; both ends are skipped",
            )


def skipped_ranges(words: Sequence[str]) -> tuple[range, ...]:
    """Return the iterations to skip, from 1, as sorted ranges; adjacent ones are merged."""
    bounds = sorted((int(first), int(last)) for first, last in (w.split("-") for w in words))
    merged: list[range] = []
    for first, last in bounds:
        if merged and first <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, last + 1))
        else:
            merged.append(range(first, last + 1))
    return tuple(merged)
