"""Which rank keeps the others waiting (`--straggler-report-interval`).

Ranks that communicate take equally long for a step, so the length of a step names nobody: the rank
that computes longest waits least. What a reader would get wrong: the host of a GPU does not wait
where the GPU does, so there only waits for data are reported, and the rest is in a profile.
"""

import math
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from megatron import device, log
from megatron.loop.hooks import CompletedStep, due
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.peers.activity import Activity, StepTimes
from megatron.peers.stacks import ProcessName
from megatron.progress import Progress


class RankTimes(NamedTuple):
    """Seconds of a number of steps on one rank."""

    process: ProcessName
    times: StepTimes


class Slowest(NamedTuple):
    """The rank that took longest for something.

    Attributes:
        rank: its number; the lowest of several that took equally long.
        seconds: how long it took.
        median: what the median rank took, the faster one of the two in the middle.
    """

    rank: int
    seconds: float
    median: float

    @property
    def factor(self) -> float:
        """How many times longer than the median rank it took."""
        if self.seconds == self.median:
            return 1.0
        return self.seconds / self.median if self.median > 0 else math.inf


def slowest(seconds: Sequence[float]) -> Slowest:
    """Return the rank that took longest, from what each rank took."""
    rank = max(range(len(seconds)), key=lambda at: (seconds[at], -at))
    return Slowest(rank, seconds[rank], median_low(seconds))


def straggler_line(ranks: Sequence[RankTimes], steps: int, *, with_computing: bool) -> str:
    """Return the log line about `steps` steps, from the times of all ranks in their order.

    Args:
        with_computing: whether times of computing were measured.
    """

    def name(rank: int) -> str:
        return f"rank {rank} ({ranks[rank].process})"

    parts = [f"stragglers of {steps} step{'s' * (steps != 1)}, seconds a step"]
    if with_computing:
        computing = slowest([rank.times.computing for rank in ranks])
        parts.append(
            f"computing: median {computing.median / steps:.3g}, longest {name(computing.rank)} "
            f"{computing.seconds / steps:.3g}, {computing.factor:.2f} times the median; it waited "
            f"{ranks[computing.rank].times.peers / steps:.3g} for other ranks"
        )
    data = slowest([rank.times.data for rank in ranks])
    if data.seconds > 0:
        waits = f"longest {name(data.rank)} {data.seconds / steps:.3g}"
    else:
        waits = "none"
    return " | ".join([*parts, f"waiting for data: {waits}"])


class ReportStragglers:
    """Log who keeps the others waiting, every `interval` iterations; never where it is 0."""

    def __init__(self, activity: Activity, world: Group, interval: int) -> None:
        self._activity, self._world, self._interval = activity, world, interval
        self._steps, self._before = 0, activity.step_times()

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        """Gather the times of all ranks if it is due, and log them on rank 0."""
        self._steps += 1
        if due(self._interval, progress):
            times = self._activity.step_times()
            own = RankTimes(ProcessName.own(), times.since(self._before))
            ranks = all_gather_object(own, self._world)
            on_host = device.current().type == "cpu"
            log.info(straggler_line(ranks, self._steps, with_computing=on_host))
            self._steps, self._before = 0, times
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        """Return whether the report is due: its times are those of whole steps."""
        return due(self._interval, progress)
