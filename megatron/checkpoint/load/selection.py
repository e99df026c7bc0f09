"""Selects the parameters to load by patterns of their names, and reports each.

Every parameter is loaded exactly once or reported as left at its initial value; every tensor of the
checkpoint that is not loaded is reported as skipped. A pattern without a match is an error.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import NamedTuple

from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.sharded import ShardedTensor
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext

PREFIX = "model/"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Selection(NamedTuple):
    """Names that fit one of `only` (no pattern: all) and none of `excepted`."""

    only: tuple[str, ...] = ()
    excepted: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether anything may be left out."""
        return bool(self.only or self.excepted)

    def takes(self, key: str) -> bool:
        """Return whether the tensor `key` (`model/<parameter>`) is to be loaded."""
        if not key.startswith(PREFIX):
            return False
        name = key.removeprefix(PREFIX)
        wanted = not self.only or any(fnmatchcase(name, pattern) for pattern in self.only)
        return wanted and not any(fnmatchcase(name, pattern) for pattern in self.excepted)


class Choice(NamedTuple):
    """The parameters that are loaded, left at initial values or skipped, on all ranks."""

    loaded: tuple[str, ...]
    left: tuple[str, ...]  # at their initial values
    skipped: tuple[str, ...]  # of the checkpoint

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.left)
        lines = [
            f"loaded {len(self.loaded)} of {total} parameters: {folded(self.loaded) or 'none'}",
            f"left at initial values: {folded(self.left) or 'none'}",
            f"skipped in the checkpoint: {folded(self.skipped) or 'nothing'}",
        ]
        return "\n  ".join(lines)


def choose_states(
    selection: Selection,
    tensors: Sequence[ShardedTensor],
    saved: Iterable[str],
    *,
    ctx: ParallelContext,
) -> Choice:
    """Return the choice for the run's `tensors` (of this rank) and the checkpoint's `saved` names.

    Raises:
        CheckpointError: a pattern fits no parameter of the run or of the checkpoint, on every
            rank.
    """
    own_names = [tensor.name for tensor in tensors if tensor.name.startswith(PREFIX)]
    names_by_rank = run_on_all_ranks(ctx, "choosing what to load", lambda: own_names)
    run_names = list(dict.fromkeys(name for names in names_by_rank for name in names))
    saved_names = [name for name in saved if name.startswith(PREFIX)]
    known = [name.removeprefix(PREFIX) for name in dict.fromkeys([*run_names, *saved_names])]
    for flag, patterns in (("--load-only", selection.only), ("--load-except", selection.excepted)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                near = difflib.get_close_matches(pattern, known, n=2, cutoff=0.4)
                raise CheckpointError(
                    "a pattern of names fits no parameter",
                    found=f"{flag} {pattern}"
                    + (f"; near: {', '.join(near)}" if near else f"; there are {folded(known)}"),
                    fix="names are as tools/inspect_checkpoint.py shows them, without model/; "
                    "put * for any text",
                )
    loaded = [name for name in run_names if selection.takes(name)]
    return Choice(
        tuple(_without_prefix(loaded)),
        tuple(_without_prefix(name for name in run_names if not selection.takes(name))),
        tuple(_without_prefix(name for name in saved_names if not selection.takes(name))),
    )


def _without_prefix(names: Iterable[str]) -> Iterable[str]:
    return (name.removeprefix(PREFIX) for name in names)


def folded(names: Iterable[str]) -> str:
    """Join names in one line, merged where one number differs: `layers.[0-11].mlp.weight`."""
    groups: dict[str, list[int]] = {}
    for name in names:
        numbers = _NUMBER.findall(name)
        if len(numbers) == 1:
            groups.setdefault(_NUMBER.sub("{}", name), []).append(int(numbers[0]))
        else:
            groups.setdefault(name, [])
    return ", ".join(
        key.replace("{}", _ranges(numbers)) if numbers else key for key, numbers in groups.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"[{', '.join(runs)}]"
