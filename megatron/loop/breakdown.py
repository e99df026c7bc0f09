"""Where the time of a rank's steps went, read off a profiler's trace: one class for each moment.

The first class of the list that a moment belongs to has it, so the classes add up to the steps.
What a reader would get wrong: communication that runs beside computation is hidden, and no class;
on a CPU the threads of gloo take time from the computation beside them, which is not seen here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megatron.loop.overlap import (
    Event,
    Interval,
    common,
    communication_times,
    computing_times,
    interval_of,
    is_of_gpu,
    length,
    union,
    without,
)

EXPOSED, DATA, IDLE = "communication, exposed", "wait for data", "idle"
OPTIMIZER, OTHER = "optimizer", "other operators"
# Operators of a CPU and kernels of a GPU by what is in their names; the first that fits counts.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        # Where scores are in memory, on a CPU, it is their products and their softmax.
        ("attention", r"attention|flash|fmha|sdpa|^aten::(bmm|baddbmm|_softmax)"),
        ("matrix products", r"gemm|gemv|cutlass|cublas|matmul|linear|\b(\w*_)?(addmm|bmm|mm)\b"),
        ("norms", r"layer_?norm|rms_?norm"),
        ("loss", r"cross_entropy|log_softmax|nll_loss"),
    )
)
CLASSES = (OPTIMIZER, *(kind for kind, _ in _KINDS), OTHER, EXPOSED, DATA, IDLE)
_WAITS = (EXPOSED, DATA, IDLE)
_WORK = tuple(kind for kind in CLASSES if kind not in _WAITS)
_STEP = re.compile(r"step \d+")
_LATE = 0.05  # share of a step by which a rank computes longer than others before it is named


class Breakdown(NamedTuple):
    """The steps of one rank in a trace.

    Attributes:
        steps: how many there are.
        seconds: of each class of `CLASSES`, over all steps; they add up to the steps.
        hidden: seconds of communication beside computation, which is in other classes too.
    """

    steps: int
    seconds: Mapping[str, float]
    hidden: float

    @property
    def whole(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    @property
    def computed(self) -> float:
        """Seconds in which this rank waited for nothing."""
        return sum(self.seconds[kind] for kind in _WORK)

    def lines(self) -> list[str]:
        """Return a table: milliseconds a step and the share of each class that took time."""
        of_step = 1e3 / max(self.steps, 1)
        rows = [(kind, self.seconds[kind]) for kind in CLASSES if self.seconds[kind] > 0]
        table = [
            f"{kind:24} {seconds * of_step:10.2f} ms {seconds / self.whole:7.1%}"
            for kind, seconds in rows
        ]
        hidden = f"{'communication, hidden':24} {self.hidden * of_step:10.2f} ms"
        return [*table, f"{'a step':24} {self.whole * of_step:10.2f} ms", hidden]


def breakdown(events: Sequence[Event]) -> Breakdown:
    """Return where the time of the steps in a trace went; of a trace without steps nothing."""
    whole = [event for event in events if event.get("ph") == "X"]
    on_gpu = is_of_gpu(whole)
    ranges = "gpu_user_annotation" if on_gpu else "user_annotation"
    steps = [e for e in whole if e.get("cat") == ranges and _STEP.fullmatch(e["name"])]
    rest = union(interval_of(event) for event in steps)
    calls, computing = communication_times(whole), computing_times(whole)
    hidden = length(common(common(calls, computing), rest)) / 1e6
    by_kind = _by_kind(whole, "kernel" if on_gpu else "cpu_op")
    at_work = {
        OPTIMIZER: common(_named(whole, ranges, "optimizer"), computing),
        **{kind: common(times, computing) for kind, times in by_kind.items()},
        OTHER: computing,
        EXPOSED: calls,
        DATA: _named(whole, "user_annotation", "batch-generator"),
    }
    seconds = {}
    for kind in CLASSES[:-1]:
        taken = common(rest, at_work[kind])
        seconds[kind], rest = length(taken) / 1e6, without(rest, taken)
    return Breakdown(len(steps), {**seconds, IDLE: length(rest) / 1e6}, hidden)


def late_ranks(by_rank: Mapping[str, Breakdown]) -> list[str]:
    """Return a line for each rank that computed clearly longer than the median rank."""
    if len(by_rank) < 2:
        return []
    usual = median(of_rank.computed for of_rank in by_rank.values())
    usual_of = {k: median(of_rank.seconds[k] for of_rank in by_rank.values()) for k in _WORK}
    lines = []
    for rank, of_rank in sorted(by_rank.items(), key=lambda item: -item[1].computed):
        more = of_rank.computed - usual
        if more > _LATE * of_rank.whole:
            kind = max(_WORK, key=lambda kind: of_rank.seconds[kind] - usual_of[kind])
            lines.append(
                f"{rank} computed {more * 1e3 / max(of_rank.steps, 1):.2f} ms a step longer than "
                f"the median rank, most of it in: {kind}"
            )
    return lines


def _named(events: Iterable[Event], category: str, name: str) -> list[Interval]:
    return union(
        interval_of(event)
        for event in events
        if event.get("cat") == category and event["name"] == name
    )


def _by_kind(events: Iterable[Event], category: str) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {kind: [] for kind, _ in _KINDS}
    for event in events:
        if event.get("cat") == category:
            for kind, pattern in _KINDS:
                if pattern.search(event["name"]):
                    found[kind].append(interval_of(event))
                    break
    return {kind: union(intervals) for kind, intervals in found.items()}
