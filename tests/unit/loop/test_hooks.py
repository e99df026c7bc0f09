"""What follows a step: when each hook acts, and that it acts on the real thing."""

import dataclasses
import gc
import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron.config.runtime import LoggingConfig
from megatron.config.training import TrainingConfig
from megatron.engine.base import Engine, StepPlan, StepReport
from megatron.errors import NumericsError
from megatron.loop.hooks import (
    CheckNumbers,
    CheckRepeats,
    CollectGarbage,
    CompletedStep,
    ReportStep,
    SaveCheckpoints,
    collected_around,
    collecting_by_hand,
    due,
    state_of,
)
from megatron.loop.report import StepLog
from megatron.model.specs import TokenFlops
from megatron.progress import BatchSchedule, Duration, Progress
from tests.unit.engine.engines import tiny_batches, tiny_engine

STEP = CompletedStep(StepPlan(2, 8, 0.01, 0.0, 16, 0), StepReport(2.0, 1.0))


@pytest.mark.parametrize(
    ("interval", "iteration", "expected"),
    [(None, 4, False), (0, 4, False), (2, 4, True), (3, 4, False), (1, 1, True)],
)
def test_what_is_due(interval: int | None, iteration: int, expected: bool) -> None:
    assert due(interval, Progress(iteration=iteration)) is expected


def test_the_state_that_ranks_compare_is_what_decides_the_next_step() -> None:
    state = state_of(Progress(iteration=3, consumed_samples=24), tiny_engine(fp16=True))
    assert state["loss scale"] == 2.0**32
    assert (state["iteration"], state["consumed_samples"]) == (3, 24)
    assert "nonfinite_in_a_row" in state


def test_garbage_is_collected_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    for interval in (2, 0):
        hook = CollectGarbage(interval)
        for iteration in range(1, 5):
            at = Progress(iteration=iteration)
            monkeypatch.setattr(gc, "collect", lambda now=iteration: collected.append(now))
            assert hook(at, STEP) == at
            assert not hook.precedes_next_step(at)
    assert collected == [2, 4]


def test_garbage_is_collected_before_and_after_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collected"))
    for is_wanted in (True, False):
        with collected_around(is_wanted):
            done.append("evaluated")
    assert done == ["collected", "evaluated", "collected", "evaluated"]


def test_python_collects_by_itself_again_after_the_block() -> None:
    with collecting_by_hand(False):
        assert gc.isenabled()
    with collecting_by_hand(True):
        assert not gc.isenabled()
        with collecting_by_hand(True):
            pass
        assert not gc.isenabled(), "it was off before the inner one"
    with pytest.raises(ZeroDivisionError), collecting_by_hand(True):
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_step_is_reported_with_the_norm_of_the_parameters_if_asked(
    wanted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine()
    step_log = StepLog(
        LoggingConfig(log_interval=1),
        Duration(BatchSchedule(1, 8, 4), train_iters=10),
        flops_per_token=lambda _: TokenFlops(10**9, 10**9, 10**9),
        world_size=1,
    )
    at = Progress(3, 24, 384)
    assert ReportStep(step_log, engine, wanted)(at, STEP) == at
    line = capsys.readouterr().out
    assert "iteration        3/" in line
    assert (f"| params norm: {engine.params_norm():.3f} |" in line) is wanted


def test_numbers_that_are_not_finite_end_the_run() -> None:
    engine = tiny_engine()
    check = CheckNumbers(TrainingConfig(micro_batch_size=1, train_iters=10), engine)
    assert check(Progress(3), STEP) == Progress(3)
    broken = STEP._replace(result=StepReport(math.nan, 1.0), batches=tiny_batches(2))
    with pytest.raises(NumericsError, match="the loss or the gradient is not finite") as caught:
        check(Progress(3), broken)
    assert "first found nowhere: computed again" in str(caught.value)
    with torch.no_grad():
        engine.stage.get_parameter("final_norm.weight")[0] = math.inf
    with pytest.raises(NumericsError, match=r"first found rank 0, final_norm.weight, parameter"):
        check(Progress(3), broken)
    other = cast(Engine, SimpleNamespace(diagnosis=lambda: None))
    with pytest.raises(NumericsError, match="not finite") as caught:
        dataclasses.replace(check, engine=other)(Progress(3), broken)
    assert "first found" not in str(caught.value)


def test_a_step_is_computed_twice_at_its_interval() -> None:
    checked: list[object] = []
    diagnosis = SimpleNamespace(check_repeats=lambda batches, plan: checked.append(batches))
    check = CheckRepeats(cast(Engine, SimpleNamespace(diagnosis=lambda: diagnosis)), 2)
    for iteration in range(1, 5):
        at, step = Progress(iteration), STEP._replace(batches=tiny_batches(iteration))
        assert check.precedes_next_step(at) is (iteration % 2 == 0)
        assert check(at, step) == at
    assert [len(cast(list[object], batches)) for batches in checked] == [2, 4]


def test_a_checkpoint_is_saved_at_each_interval_and_the_last_step_once() -> None:
    saved: list[int] = []
    save = SaveCheckpoints(
        lambda progress: saved.append(progress.iteration), 4, 6, None, also=(5,), saved_iteration=2
    )
    save.save_unsaved(Progress(2))  # what was loaded is there already
    for iteration in range(3, 10):
        assert save(Progress(iteration), STEP) == Progress(iteration)
    assert saved == [4, 5, 6, 8]
    save.save_unsaved(Progress(9))
    save.save_unsaved(Progress(9))
    assert saved == [4, 5, 6, 8, 9]
