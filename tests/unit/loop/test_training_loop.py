"""When the loop reads the report of a step: after the next one has started, and before it must."""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.engine.base import Engine, PendingReport, RawBatch, StepPlan, StepReport
from megatron.errors import NumericsError
from megatron.lengths import batch_schedule
from megatron.lengths import duration as duration_of
from megatron.loop.hooks import CompletedStep, SaveCheckpoints, due
from megatron.loop.overlap import read_trace
from megatron.loop.profile import Profile
from megatron.loop.report import StepLog
from megatron.loop.stop import StopConditions
from megatron.loop.training_loop import TrainingLoop
from megatron.model.specs import TokenFlops
from megatron.mpu.context import ParallelContext
from megatron.peers.activity import Activity
from megatron.progress import Progress
from tests.support.tiny import tiny_run

WORLD = ParallelContext.single().world
Report = Callable[[int], StepReport]


def fine(step: int) -> StepReport:
    return StepReport(2.0, 1.0)


class Steps:
    """A training of an engine that does nothing, and what happened in it, in order."""

    def __init__(
        self, report: Report = fine, *, save: int = 0, evaluate: int = 0, **flags: Any
    ) -> None:
        config = tiny_run("nowhere", **{"train_iters": 5, "log_interval": 100} | flags)
        self.events: list[str] = []
        self.skipped: set[int] = set()
        self.signal_during = 0
        self._report, self._started, self._evaluate = report, 0, evaluate
        duration = duration_of(config, batch_schedule(config, 1))
        self._stop = StopConditions(config.training, duration, WORLD)
        self._loop = TrainingLoop(
            cast(Engine, self),
            config,
            WORLD,
            duration,
            None,
            StepLog(
                config.logging,
                duration,
                flops_per_token=lambda _: TokenFlops(1, 1, 1),
                world_size=1,
            ),
            self._stop,
            cast(Any, SimpleNamespace(poll=lambda: None, wait=lambda: None)),
            Profile(config.logging, WORLD),
            Activity(),
        )
        self._save = SaveCheckpoints(
            lambda progress: self.events.append(f"save {progress.iteration}"),
            save,
            saved_iteration=0,
        )

    def train(self) -> tuple[Progress, str]:
        return self._loop.train(Progress(), self._batches, (self,), self._save)

    def _batches(self, plan: StepPlan, progress: Progress) -> Iterator[RawBatch] | None:
        if progress.iteration + 1 not in self.skipped:
            return iter(())
        self._started += 1
        return None

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool]
    ) -> PendingReport:
        self._started += 1
        number = self._started
        self.events.append(f"start {number}")
        if number == self.signal_during:
            self._stop._on_signal(signal.SIGTERM, None)

        def read() -> StepReport:
            self.events.append(f"read {number}")
            report = self._report(number)
            return StepReport(report.loss, report.grad_norm, report.skipped, signals=tuple(signals))

        return read

    def diagnosis(self) -> None:
        return None

    def __call__(self, progress: Progress, step: CompletedStep, /) -> Progress:
        if self.precedes_next_step(progress):
            self.events.append(f"evaluate {progress.iteration}")
            return progress.after_evaluation(samples=8)
        return progress

    def precedes_next_step(self, progress: Progress) -> bool:
        return due(self._evaluate, progress)


def test_a_report_is_read_while_the_next_step_runs() -> None:
    """The first and the last step have a line in the log, with the time that they took."""
    steps = Steps()
    progress, reason = steps.train()
    assert steps.events == [
        *("start 1", "read 1", "start 2", "start 3", "read 2", "start 4", "read 3"),
        *("start 5", "read 4", "read 5", "save 5"),
    ]
    assert (progress.iteration, progress.consumed_samples) == (5, 40)
    assert reason == "training is complete at iteration 5"


def test_what_needs_the_weights_of_a_step_comes_before_the_next_one() -> None:
    steps = Steps(train_iters=6, save=3, evaluate=4)
    progress, _ = steps.train()
    assert steps.events == [
        *("start 1", "read 1", "start 2", "start 3", "read 2", "read 3", "save 3"),
        *("start 4", "read 4", "evaluate 4", "start 5", "start 6", "read 5", "read 6", "save 6"),
    ]
    assert progress.consumed_valid_samples == 8


def test_every_step_that_has_a_line_is_read_at_once() -> None:
    steps = Steps(train_iters=3, log_interval=1)
    steps.train()
    assert steps.events == ["start 1", "read 1", "start 2", "read 2", "start 3", "read 3", "save 3"]


def test_a_profile_has_whole_steps_and_ends_before_the_next_one(tmp_path: Path) -> None:
    profile = {"profile": True, "profile_step_start": 1, "profile_step_end": 3}
    steps = Steps(**profile, profile_dir=str(tmp_path))
    steps.train()
    assert steps.events[:9] == [
        *("start 1", "read 1", "start 2", "start 3", "read 2", "read 3"),
        *("start 4", "start 5", "read 4"),
    ]
    (trace,) = tmp_path.iterdir()
    assert trace.name == "rank0-step2-3.pt.trace.json.gz"
    named = {event["name"] for event in read_trace(trace)}
    assert {name for name in named if name.startswith("step ")} == {"step 2", "step 3"}


def test_nothing_is_saved_after_numbers_that_are_not_finite() -> None:
    def broken(step: int) -> StepReport:
        return StepReport(math.nan, math.nan, skipped=True) if step == 2 else fine(step)

    steps = Steps(broken, save=3)
    with pytest.raises(NumericsError, match="at iteration 2"):
        steps.train()
    assert steps.events == ["start 1", "read 1", "start 2", "start 3", "read 2"]


def test_steps_that_changed_nothing_are_counted_when_they_are_read() -> None:
    def broken(step: int) -> StepReport:
        return StepReport(2.0, math.inf, skipped=True) if step in (2, 3) else fine(step)

    progress, _ = Steps(broken, nonfinite_policy="skip").train()
    assert (progress.iteration, progress.skipped_iterations) == (5, 2)
    assert progress.nonfinite_in_a_row == 0
    steps = Steps(broken, nonfinite_policy="skip", nonfinite_limit=1)
    with pytest.raises(NumericsError, match=r"2 in a row(.|\n)*at iteration 3"):
        steps.train()


def test_an_iteration_without_a_step_waits_for_the_one_before() -> None:
    def broken(step: int) -> StepReport:
        return StepReport(2.0, math.inf, skipped=True) if step == 2 else fine(step)

    steps = Steps(broken, nonfinite_policy="skip")
    steps.skipped = {3, 4}
    progress, _ = steps.train()
    assert steps.events == ["start 1", "read 1", "start 2", "read 2", "start 5", "read 5", "save 5"]
    assert (progress.iteration, progress.skipped_iterations) == (5, 3)


def test_a_signal_travels_with_the_next_step_and_all_is_read_before_the_end() -> None:
    steps = Steps(train_iters=20)
    steps.signal_during = 3  # begun: so step 4 is the first to carry it
    progress, reason = steps.train()
    assert reason == "SIGTERM was received; exiting program"
    assert steps.events[-4:] == ["start 5", "read 4", "read 5", "save 5"]
    assert progress.iteration == 5


def test_a_signal_ends_the_run_at_once_where_no_step_runs() -> None:
    steps = Steps(train_iters=20, save=3)
    steps.signal_during = 3
    progress, _ = steps.train()
    assert steps.events[-3:] == ["read 2", "read 3", "save 3"]
    assert progress.iteration == 3
