"""Which rank is named: the one that computes longest, by how much, and who waits for data."""

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron import log
from megatron.engine.base import StepPlan, StepReport
from megatron.loop.hooks import CompletedStep
from megatron.loop.stragglers import RankTimes, ReportStragglers, slowest, straggler_line
from megatron.mpu.context import ParallelContext
from megatron.peers.activity import Activity, StepTimes
from megatron.peers.stacks import ProcessName
from megatron.progress import Progress

STEP = CompletedStep(StepPlan(2, 8, 0.01, 0.0, 16, 0), StepReport(2.0, 1.0))
MANY = 200  # random sets of times


def of_ranks(*times: StepTimes) -> list[RankTimes]:
    return [
        RankTimes(ProcessName(f"host{at} boot", 7 + at, 1), each) for at, each in enumerate(times)
    ]


def test_a_rank_that_takes_longest_is_found_whatever_the_others_take() -> None:
    draw = random.Random(0)
    for _ in range(MANY):
        others = [draw.uniform(0.5, 1.5) for _ in range(draw.randint(1, 9))]
        rank, factor = draw.randint(0, len(others)), draw.uniform(1.01, 5.0)
        seconds = [*others[:rank], max(others) * factor, *others[rank:]]
        found = slowest(seconds)
        assert (found.rank, found.seconds) == (rank, max(seconds))
        assert found.median in seconds
        assert sum(each <= found.median for each in seconds) * 2 >= len(seconds)
        assert found.factor == pytest.approx(found.seconds / found.median)
        scaled = slowest([3 * each for each in seconds])
        assert (scaled.rank, scaled.factor) == (rank, pytest.approx(found.factor))


def test_the_median_of_two_ranks_is_the_faster_one() -> None:
    assert slowest([1.0, 3.0]).factor == 3.0
    assert slowest([3.0, 1.0]).rank == 0


def test_equal_ranks_have_the_factor_one() -> None:
    assert slowest([0.0, 0.0]) == (0, 0.0, 0.0)
    assert slowest([0.0, 0.0]).factor == 1.0
    assert slowest([0.0, 0.0, 2.0]).factor == math.inf


def test_the_line_names_ranks_with_their_processes_and_their_times() -> None:
    ranks = of_ranks(StepTimes(1.0, 0.0, 4.0), StepTimes(5.0, 0.5, 0.1), StepTimes(2.0, 1.0, 3.0))
    assert straggler_line(ranks, 10, with_computing=True) == (
        "stragglers of 10 steps, seconds a step | computing: median 0.2, longest rank 1 (process 8 "
        "on host1) 0.5, 2.50 times the median; it waited 0.01 for other ranks | waiting for data: "
        "longest rank 2 (process 9 on host2) 0.1"
    )
    alone = straggler_line(of_ranks(StepTimes(1.0, 0.0, 0.0)), 1, with_computing=False)
    assert alone == "stragglers of 1 step, seconds a step | waiting for data: none"


def test_a_report_is_of_the_steps_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    total = StepTimes(0.0, 0.0, 0.0)
    activity = SimpleNamespace(step_times=lambda: total)
    hook = ReportStragglers(cast(Any, activity), ParallelContext.single().world, 3)
    for iteration in range(1, 7):
        total = StepTimes(*(before + iteration for before in total))
        at = Progress(iteration=iteration)
        assert hook.precedes_next_step(at) is (iteration in (3, 6))
        assert hook(at, STEP) == at
    assert ["median 2," in lines[0], "median 5," in lines[1], len(lines)] == [True, True, 2]


def test_nothing_is_reported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "info", pytest.fail)
    hook = ReportStragglers(Activity(), ParallelContext.single().world, 0)
    assert hook(Progress(iteration=1), STEP) == Progress(iteration=1)
    assert not hook.precedes_next_step(Progress(iteration=1))
