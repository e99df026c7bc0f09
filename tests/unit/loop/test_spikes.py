"""Which loss is a spike, and what is done about it."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron import log
from megatron.checkpoint.folder.skips import record_skip, recorded_skips
from megatron.engine.base import StepPlan, StepReport
from megatron.errors import RewindError
from megatron.loop.hooks import CompletedStep
from megatron.loop.spikes import (
    WINDOW,
    RecentLosses,
    WatchLoss,
    is_spike,
    with_recorded_skips,
)
from megatron.mpu.context import ParallelContext
from megatron.progress import Progress
from tests.support.tiny import tiny_run

STEP = CompletedStep(StepPlan(2, 8, 0.01, 0.0, 16, 0), StepReport(2.0, 1.0))
CONTEXT = ParallelContext.single()
MANY = 200  # random windows


def watch(recent: RecentLosses, *, saved: int = 0, **flags: Any) -> WatchLoss:
    return WatchLoss(tiny_run("nowhere", **flags), recent, CONTEXT, lambda: saved)


def after(hook: WatchLoss, *losses: float, first: int = 1) -> None:
    for iteration, loss in enumerate(losses, first):
        step = STEP._replace(result=StepReport(loss, 1.0))
        assert hook(Progress(iteration), step) == Progress(iteration)
        assert not hook.precedes_next_step(Progress(iteration))


def test_a_spike_is_above_the_factor_times_the_median_of_those_before() -> None:
    draw = random.Random(0)
    for _ in range(MANY):
        before = [draw.uniform(1.0, 9.0) for _ in range(WINDOW)]
        factor, half = draw.uniform(1.1, 4.0), WINDOW // 2
        middle = sum(sorted(before)[half - 1 : half + 1]) / 2
        assert is_spike(factor * middle * 1.001, before, factor)
        assert not is_spike(factor * middle * 0.999, before, factor)
        # A few losses that are much higher do not move the median beyond their neighbours.
        assert is_spike(factor * max(before) * 1.001, [*before[4:], *[1e9] * 4], factor) or (
            sorted([*before[4:], *[1e9] * 4])[half] > max(before)
        )


def test_nothing_is_judged_before_the_window_is_full_or_of_what_is_not_finite() -> None:
    assert not is_spike(1e9, [1.0] * (WINDOW - 1), 2.0)
    assert is_spike(1e9, [1.0] * WINDOW, 2.0)
    for loss in (math.nan, math.inf):
        assert not is_spike(loss, [1.0] * WINDOW, 2.0)


def test_losses_that_are_not_finite_are_not_remembered() -> None:
    recent = RecentLosses()
    for loss in [math.nan, *map(float, range(WINDOW + 3)), math.inf]:
        recent.add(loss)
    assert list(recent.values) == [float(loss) for loss in range(3, WINDOW + 3)]


def test_a_spike_is_warned_of_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(log, "warning", warned.append)
    recent = RecentLosses()
    after(watch(recent, loss_spike_factor=2.0), *[1.0] * WINDOW, 2.0, 2.5, 1.0)
    assert len(warned) == 1
    assert warned[0].startswith(
        f"the loss has spiked: loss 2.5 at iteration {WINDOW + 2}, 1 is the"
    )
    assert list(recent.values)[-3:] == [2.0, 2.5, 1.0]


def test_without_a_factor_nothing_is_a_spike_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "warning", pytest.fail)
    recent = RecentLosses()
    after(watch(recent), *[1.0] * WINDOW, 1e9)
    assert not recent.values


def test_going_back_records_the_iterations_since_the_checkpoint(tmp_path: Path) -> None:
    flags = {"loss_spike_factor": 2.0, "loss_spike_action": "rewind", "save": str(tmp_path)}
    hook = watch(RecentLosses(), saved=30, **flags)
    after(hook, *[1.0] * WINDOW)
    with pytest.raises(RewindError, match="goes back to its last checkpoint") as caught:
        after(hook, 2.5, first=WINDOW + 1)
    assert recorded_skips(tmp_path) == (f"31-{WINDOW + 1}",)
    assert (
        "start the same command again: it passes over the iterations 31 to 33" in caught.value.fix
    )
    assert caught.value.retryable


def test_recorded_iterations_are_added_to_those_of_the_flag(tmp_path: Path) -> None:
    config = tiny_run("nowhere", save=str(tmp_path), skip_train_iteration_range=("2-3", "7-8"))
    assert with_recorded_skips(config, CONTEXT) is config
    record_skip(tmp_path, 7, 8)
    record_skip(tmp_path, 20, 24)
    added = with_recorded_skips(config, CONTEXT)
    assert added.training.skipped == (range(2, 4), range(7, 9), range(20, 25))
    assert dataclasses.replace(added, training=config.training) == config
    for save in (None, "memory://run"):
        other = tiny_run("nowhere", save=save)
        assert with_recorded_skips(other, CONTEXT) is other
