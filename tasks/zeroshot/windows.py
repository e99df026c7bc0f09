"""A long text as windows, of which each token is scored exactly once: arithmetic only."""

import math
from collections.abc import Sequence

from megatron.engine.scoring import ScoringRow
from megatron.errors import ConfigError


def overlapping_windows(tokens: Sequence[int], *, length: int, step: int) -> list[ScoringRow]:
    """Return rows that score every token but the first once, with the longest context.

    The first window scores `length` tokens; each further one reads `length` too but scores the last
    `step` alone (Megatron-LM's `--overlapping-eval`; with step = length windows do not overlap).

    Args:
        tokens: of the whole text.
        length: tokens that a row is read by.
        step: from 1 to `length`.
    """
    if not 1 <= step <= length:
        raise ConfigError(
            "windows cannot advance by that much",
            found=f"--overlapping-eval {step}, windows of {length} tokens",
            fix=f"use a number from 1 to {length}",
        )
    targets = len(tokens) - 1  # token i + 1 is the target of position i
    rows = []
    for at in range(math.ceil(max(targets - length, 0) / step) + 1):
        start = at * step
        first = 1 if at == 0 else length - step + 1
        window = tuple(tokens[start : start + length + 1])
        if len(window) > first:
            rows.append(ScoringRow(window, first))
    return rows


def rolling_windows(tokens: Sequence[int], *, prefix: int, length: int) -> list[ScoringRow]:
    """Return rows that together score every token, the first one after `prefix` alone.

    As lm-eval-harness cuts a text for its rolling log-likelihood: windows score `length` tokens
    each, given one before them; the last one, which scores fewer, is given as much as fits.
    """
    rows, all_tokens = [], [prefix, *tokens]
    for start in range(0, len(tokens), length):
        stop = min(start + length, len(tokens))
        first = start if stop - start == length or start == 0 else stop - length
        window = tuple(all_tokens[first : stop + 1])
        rows.append(ScoringRow(window, len(window) - (stop - start)))
    return rows
