"""How much of each group's communication ran beside computation, read off a profiler's trace.

On a CPU a rank computes while an operator of PyTorch or of ours runs and does not wait; on a GPU
while a kernel runs that is not NCCL's. Communication includes the time in which its group's ranks
wait for the last of them. What a reader would get wrong: calls of a group that run at once count
once, so times are those of a clock.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import DataError
from megatron.spans import WAIT, Communication

Event = Mapping[str, Any]  # of the Chrome format; times in microseconds

_OPERATORS = ("aten::", "megatron::")


class Interval(NamedTuple):
    """A stretch of time; the unit is the caller's."""

    start: float
    stop: float


class GroupOverlap(NamedTuple):
    """The communication of one rank in one group.

    Attributes:
        group: its name, a field of `ParallelContext`.
        calls: how many there were, which `bytes` were given to.
        seconds: in which at least one of them ran.
        overlapped: seconds of those in which this rank computed.
    """

    group: str
    calls: int
    bytes: int
    seconds: float
    overlapped: float

    def __str__(self) -> str:
        share = self.overlapped / self.seconds if self.seconds else 0.0
        return (
            f"{self.group}: overlapped {share:.0%} of {self.seconds * 1e3:.1f} ms "
            f"({self.calls} calls, {self.bytes / 1e6:.1f} MB)"
        )


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace that --profile has written.

    Raises:
        DataError: the file cannot be read, or is none.
    """
    try:
        text = gzip.decompress(path.read_bytes())
        return [dict(event) for event in json.loads(text)["traceEvents"]]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            "a trace cannot be read",
            found=f"{path}: {error}",
            fix="give a .json.gz file that --profile has written",
        ) from error


def overlaps(events: Iterable[Event]) -> list[GroupOverlap]:
    """Return the communication of each group, in the order of its first call."""
    whole = [event for event in events if event.get("ph") == "X"]
    computing = computing_times(whole)
    calls: dict[str, list[tuple[Communication, Interval]]] = defaultdict(list)
    for call, interval in _calls(whole):
        calls[call.group].append((call, interval))
    found = []
    for group, of_group in calls.items():
        times = union(interval for _, interval in of_group)
        found.append(
            GroupOverlap(
                group,
                calls=len(of_group),
                bytes=sum(call.bytes for call, _ in of_group),
                seconds=length(times) / 1e6,
                overlapped=length(common(times, computing)) / 1e6,
            )
        )
    return found


def is_of_gpu(events: Iterable[Event]) -> bool:
    """Return whether a rank of this trace computes on a GPU."""
    return any(event.get("cat") == "kernel" for event in events)


def computing_times(events: Sequence[Event]) -> list[Interval]:
    """Return when a rank computed; events are those with a duration."""
    return _on_gpu(events) if is_of_gpu(events) else _on_cpu(events)


def communication_times(events: Sequence[Event]) -> list[Interval]:
    """Return when any communication of a rank ran, or was waited for."""
    waits = [interval_of(event) for event in events if event["name"] == WAIT]
    return union([*(interval for _, interval in _calls(events)), *waits])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that any of `intervals` covers, in stretches that do not touch."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1].stop:
            found[-1] = Interval(found[-1].start, max(found[-1].stop, stop))
        else:
            found.append(Interval(start, stop))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the time that two unions share."""
    found, at_one, at_other = [], 0, 0
    while at_one < len(one) and at_other < len(other):
        start = max(one[at_one].start, other[at_other].start)
        stop = min(one[at_one].stop, other[at_other].stop)
        if start < stop:
            found.append(Interval(start, stop))
        if one[at_one].stop < other[at_other].stop:
            at_one += 1
        else:
            at_other += 1
    return found


def without(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return the time of the first union that is not in the second."""
    edges = [-float("inf"), *(edge for interval in taken for edge in interval), float("inf")]
    return common(whole, [Interval(*gap) for gap in zip(edges[::2], edges[1::2])])


def length(intervals: Iterable[Interval]) -> float:
    """Return the time in a union."""
    return sum(stop - start for start, stop in intervals)


def _calls(events: Sequence[Event]) -> Iterator[tuple[Communication, Interval]]:
    """Yield communications in the order in which they began."""
    carried = "gpu_user_annotation" if is_of_gpu(events) else "user_annotation"
    for event in sorted(events, key=lambda event: float(event["ts"])):
        call = Communication.read(event["name"]) if event.get("cat") == carried else None
        if call is not None:
            yield call, interval_of(event)


def _on_gpu(events: Iterable[Event]) -> list[Interval]:
    return union(
        interval_of(event)
        for event in events
        if event.get("cat") == "kernel" and "nccl" not in event["name"].lower()
    )


def _on_cpu(events: Iterable[Event]) -> list[Interval]:
    """Return when any thread was in an operator, and was not in a call or a wait."""
    operators: dict[object, list[Interval]] = defaultdict(list)
    others: dict[object, list[Interval]] = defaultdict(list)
    for event in events:
        if event["name"].startswith(_OPERATORS) and event.get("cat") == "cpu_op":
            operators[event["tid"]].append(interval_of(event))
        elif event["name"] == WAIT or event["name"].startswith("c10d::"):
            others[event["tid"]].append(interval_of(event))
    return union(_without_waits(operators, others))


def _without_waits(
    operators: Mapping[object, list[Interval]], others: Mapping[object, list[Interval]]
) -> Iterator[Interval]:
    for thread, intervals in operators.items():
        yield from without(union(intervals), union(others.get(thread, ())))


def interval_of(event: Event) -> Interval:
    """Return the time of an event with a duration."""
    start = float(event["ts"])
    return Interval(start, start + float(event["dur"]))
