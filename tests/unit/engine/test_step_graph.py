"""When steps are captured, and what is said where they are not; tests/laws have their numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron import device
from megatron.engine.base import StepPlan
from megatron.engine.step_graph import WARMUP_STEPS
from megatron.errors import MachineError
from tests.laws.recorded_call import RecordedCall, captured_by_recording
from tests.support.output import without_times
from tests.support.tiny import TOKENS_PER_SAMPLE
from tests.unit.engine.engines import tiny_batches, tiny_engine

PLAN = StepPlan(2, 2, 0.01, 0.1, TOKENS_PER_SAMPLE, 0)


def test_steps_are_captured_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedCall, "made", 0)
    with captured_by_recording():
        engine, made = tiny_engine(cuda_graph=True), []
        for _ in range(WARMUP_STEPS + 2):
            engine.train_step(iter(tiny_batches(2)), PLAN)
            made.append(RecordedCall.made)
    assert made == [*(0 for _ in range(WARMUP_STEPS)), 1, 1]


def test_on_a_cpu_steps_are_not_captured_and_it_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = tiny_engine(cuda_graph=True, log_level="info")
    assert without_times(capsys.readouterr().out) == "--cuda-graph has no effect on a CPU\n"
    assert engine._graph is None


def failing(error: RuntimeError) -> type:
    class Failing:
        def __init__(self, call: Callable[[], object]) -> None:
            raise error

    return Failing


def fourth_step(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> Any:
    monkeypatch.setattr(device, "can_capture", lambda: True)
    monkeypatch.setattr(device, "CapturedCall", failing(error))
    engine = tiny_engine(cuda_graph=True)
    for _ in range(WARMUP_STEPS):
        engine.train_step(iter(tiny_batches(2)), PLAN)
    return engine.train_step(iter(tiny_batches(2)), PLAN)


def test_passes_that_cannot_be_captured_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RuntimeError("operation not permitted when stream is capturing\nand more")
    with pytest.raises(MachineError, match="cannot be captured") as error:
        fourth_step(monkeypatch, refused)
    assert error.value.found == "operation not permitted when stream is capturing"
    assert error.value.fix == "leave --cuda-graph out"


def test_too_little_memory_is_no_fault_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        fourth_step(monkeypatch, torch.OutOfMemoryError("no room"))
