"""Where the time of a run went over all its starts: steps that were kept, and everything else.

Each start of a supervised run keeps an account in a file of its own, which rank 0 writes while it
trains. Lost are the steps after the last checkpoint before a failure: the next start repeats them.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron import atomic
from megatron.peers.activity import DATA, EVALUATION, HOOKS, SAVE, START, STEP, Activity

_EVERY_S = 1.0  # between two writes of an account


class Account(NamedTuple):
    """The time of one start, as its rank 0 wrote it last.

    Attributes:
        began: when its ranks had met, in seconds since 1970.
        updated: when this was written.
        first: iterations that were done when it began to train.
        iteration: iterations that are done now.
        seconds: by section.
    """

    began: float
    updated: float
    first: int
    iteration: int
    seconds: Mapping[str, float]


class Goodput(NamedTuple):
    """The seconds of a run, by what they were for; they add up to `total`."""

    total: float
    starts: int
    kept: float  # in steps that no later start repeated
    lost: float  # in steps that one did
    data: float
    evaluation: float
    saves: float
    starting: float  # before the first step of a start
    down: float  # from the last account of a start to the beginning of the next, and until the end

    @property
    def share(self) -> float:
        """The share of the time that was spent in steps that were kept."""
        return self.kept / self.total if self.total else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The seconds by what they were for, in words."""
        return {
            "steps kept": self.kept,
            "steps repeated": self.lost,
            "waiting for data": self.data,
            "evaluation": self.evaluation,
            "saves": self.saves,
            "starting": self.starting,
            "down": self.down,
        }

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        starts = f"{self.starts} start{'s' if self.starts > 1 else ''}"
        return f"goodput {self.share:.1%} of {self.total:.1f} s in {starts}; seconds: {shown}"


def goodput(accounts: Sequence[Account], *, began: float, ended: float) -> Goodput:
    """Return where the time between `began` and `ended` went, by one account or more."""
    by_start = goodput_by_start(accounts, began=began, ended=ended)
    return Goodput(*(sum(column) for column in zip(*by_start)))


def goodput_by_start(
    accounts: Sequence[Account], *, began: float, ended: float
) -> tuple[Goodput, ...]:
    """Return the same of each start, up to the beginning of the next; the first is from `began`."""
    ends = [*(account.began for account in accounts[1:]), ended]
    begins = [began, *ends[:-1]]
    found = []
    for place, (account, start, end) in enumerate(zip(accounts, begins, ends)):
        steps = account.seconds.get(STEP, 0.0) + account.seconds.get(HOOKS, 0.0)
        done = account.iteration - account.first
        later = [other.first for other in accounts[place + 1 :]]
        repeated = max(0, account.iteration - max(account.first, min(later))) if later else 0
        share = repeated / done if done else float(bool(later))
        data, evaluation, saves, starting = (
            account.seconds.get(name, 0.0) for name in (DATA, EVALUATION, SAVE, START)
        )
        down = end - start - steps - data - evaluation - saves - starting
        kept, lost = steps * (1 - share), steps * share
        found.append(Goodput(end - start, 1, kept, lost, data, evaluation, saves, starting, down))
    return tuple(found)


class AccountKeeper:
    """Writes the account of this start into a folder, at most once a second."""

    def __init__(self, folder: str, activity: Activity, first: int) -> None:
        self._activity, self._first = activity, first
        self._began = time.time() - sum(activity.seconds().values())
        self._path = Path(folder, f"{time.time_ns():020d}-{os.getpid()}.json")
        self._written_at = 0.0

    def keep(self, iteration: int, *, now: bool = False) -> None:
        """Write the account if it is due, or `now`."""
        if not now and time.monotonic() - self._written_at < _EVERY_S:
            return
        self._written_at = time.monotonic()
        seconds = dict(self._activity.seconds())
        account = Account(self._began, time.time(), self._first, iteration, seconds)
        temporary = atomic.temporary_name(self._path)
        temporary.write_text(json.dumps(account._asdict()))
        os.replace(temporary, self._path)  # what a power failure takes of it is no loss


def accounts_in(folder: str) -> list[Account]:
    """Return the accounts of all starts in a folder, in their order."""
    return [Account(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("*.json"))]
