"""Contestants in turns, what came of them, and which targets that reaches.

What a reader would get wrong: a target that is missed, or that nothing was measured for, is
reported and is no failure; a contestant that does other work than ours is one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from benchmarks.data_worker import Answer
from megatron.errors import NumericsError

Turn = Callable[[], Answer]

_SHORTEST_SECONDS = 1e-5  # what takes less gives no rate


@dataclass
class Row:
    """The turns of one contestant: `amount` of `unit` in each turn."""

    who: str
    amount: float
    unit: str
    turns: list[Answer] = field(default_factory=list)
    cpu: float = 0.0  # seconds, median over turns
    wall: float = 0.0
    peak_mb: float | None = None  # where a turn was a process of its own

    @property
    def per_cpu_second(self) -> float:
        """Return the units per CPU second."""
        return self.amount / max(self.cpu, 1e-9)


@dataclass(frozen=True)
class Target:
    """One target of a measurement; `found` is None where it was not measured."""

    what: str
    found: float | None
    at_least: float | None = None
    below: float | None = None

    @property
    def reached(self) -> bool | None:
        """Return whether the target is reached; None where it was not measured."""
        if self.found is None:
            return None
        if self.at_least is not None:
            return self.found >= self.at_least
        return self.below is not None and self.found < self.below


@dataclass
class Section:
    """One table with its targets and the notes needed to read it."""

    name: str
    description: str
    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def take_turns(
    contestants: Mapping[str, Turn], *, repeats: int, amount: float, unit: str, fresh: bool = False
) -> list[Row]:
    """Run all contestants `repeats` times, every other time in reverse order.

    With `fresh` each turn is a process of its own, so that its peak memory is meaningful.
    """
    rows = {who: Row(who, amount, unit) for who in contestants}
    for number in range(repeats):
        for who in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            rows[who].turns.append(contestants[who]())
    for row in rows.values():
        row.cpu = median(turn["cpu"] for turn in row.turns)
        row.wall = median(turn["wall"] for turn in row.turns)
        if fresh:
            row.peak_mb = median(turn["peak_mb"] for turn in row.turns)
    return list(rows.values())


def ratio(one: Row | None, other: Row | None, key: str = "cpu") -> float | None:
    """Return the median ratio of the seconds of `one` to those of `other`, turn by turn."""
    if one is None or other is None:
        return None
    return float(median(a[key] / max(b[key], 1e-9) for a, b in zip(one.turns, other.turns)))


def row_of(rows: list[Row], who: str) -> Row | None:
    """Return the row of `who`, if there is one."""
    return next((row for row in rows if row.who == who), None)


def require_equal(what: str, ours: object, peers: object) -> None:
    """Raise an error unless both contestants computed the same."""
    if ours != peers:
        raise NumericsError(
            f"ours and the peer's differ: {what}",
            found=f"ours {ours}, the peer's {peers}",
            fix="compare the two outputs before how fast they are made",
        )


def table(section: Section) -> str:
    """Return the section as a table."""
    lines = [f"== {section.name}: {section.description}"]
    if section.rows:
        width = max(len(row.who) for row in section.rows)
        peaks = any(row.peak_mb is not None for row in section.rows)
        head = f"{'':<{width}}{'per CPU s':>15}{'CPU s':>11}{'wall s':>11}"
        lines.append(head + ("    peak MB" if peaks else "") + "  unit")
    for row in section.rows:
        peak = "" if row.peak_mb is None else f"{row.peak_mb:>11.0f}"
        rate = f"{row.per_cpu_second:>15,.{0 if row.per_cpu_second > 1000 else 2}f}"
        if row.cpu < _SHORTEST_SECONDS:
            rate = f"{'too short':>15}"
        seconds = "".join(
            f"{value:>11.4f}" if value >= _SHORTEST_SECONDS else f"{'-':>11}"
            for value in (row.cpu, row.wall)
        )
        lines.append(f"{row.who:<{width}}{rate}{seconds}{peak}  {row.unit}")
    lines += [f"  {_target_line(target)}" for target in section.targets]
    lines += [f"  note: {note}" for note in section.notes]
    return "\n".join(lines) + "\n"


def _target_line(target: Target) -> str:
    wanted = f">= {target.at_least:g}" if target.at_least is not None else f"< {target.below:g}"
    if target.found is None:
        return f"target {wanted}: {target.what}: not measured"
    outcome = "reached" if target.reached else "NOT REACHED"
    return f"target {wanted}: {target.what}: {target.found:.4g}, {outcome}"
