"""What is done about a loss or a gradient that is not finite."""

import dataclasses
import math

import pytest

from megatron import log
from megatron.config.training import NonfinitePolicy, TrainingConfig
from megatron.engine.base import StepReport
from megatron.errors import NumericsError
from megatron.loop.anomaly import check_numbers
from megatron.progress import Progress

STOP = TrainingConfig(micro_batch_size=1, train_iters=5)
SKIP = dataclasses.replace(STOP, nonfinite_policy=NonfinitePolicy.SKIP, nonfinite_limit=2)


def nobody() -> None:
    """The origin of a number that nobody can name."""


def test_finite_numbers_pass() -> None:
    check_numbers(StepReport(2.0, 1.0), Progress(iteration=1), STOP, nobody)


def test_an_overflow_under_loss_scaling_is_no_anomaly() -> None:
    report = StepReport(2.0, math.inf, skipped=True, overflow=True)
    check_numbers(report, Progress(iteration=1), STOP, nobody)


@pytest.mark.parametrize(
    "report",
    [
        StepReport(math.nan, 1.0),
        StepReport(math.inf, 1.0, overflow=True),
        StepReport(2.0, math.inf, skipped=True),
    ],
)
def test_the_policy_stop_stops_at_once(report: StepReport) -> None:
    with pytest.raises(NumericsError, match="the loss or the gradient is not finite") as caught:
        check_numbers(report, Progress(iteration=7), STOP, nobody)
    assert "at iteration 7" in str(caught.value)
    assert "--nonfinite-policy skip" in str(caught.value)


def test_the_policy_skip_allows_a_number_of_them_in_a_row() -> None:
    report = StepReport(math.nan, math.nan, skipped=True)
    for in_a_row in (1, 2):
        check_numbers(report, Progress(iteration=9, nonfinite_in_a_row=in_a_row), SKIP, nobody)
    with pytest.raises(NumericsError, match="too many iterations in a row were not finite"):
        check_numbers(report, Progress(iteration=9, nonfinite_in_a_row=3), SKIP, nobody)


def test_an_overflow_under_a_constant_loss_scale_names_that_scale() -> None:
    report = StepReport(2.0, math.inf, skipped=True, loss_scale=4096.0)
    with pytest.raises(NumericsError, match="constant loss scale") as caught:
        check_numbers(report, Progress(iteration=3), STOP, nobody)
    assert "--loss-scale 4096" in str(caught.value)
    check_numbers(report, Progress(iteration=3, nonfinite_in_a_row=1), SKIP, nobody)


@pytest.mark.parametrize("config", [STOP, SKIP])
def test_the_origin_is_part_of_the_message(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(log, "warning", warned.append)
    report, searches = StepReport(math.nan, math.nan, skipped=True), 0

    def origin() -> str:
        nonlocal searches
        searches += 1
        return "rank 3, layers.1.mlp"

    messages = []
    for in_a_row in (1, 2, 3):
        try:
            check_numbers(report, Progress(7, nonfinite_in_a_row=in_a_row), config, origin)
        except NumericsError as error:
            messages.append(str(error))
    # Under "skip" of the first one in a row, and where the run ends.
    assert [len(warned), len(messages), searches] == ([0, 3, 3] if config is STOP else [1, 1, 2])
    assert all("; first found rank 3, layers.1.mlp" in text for text in warned + messages)
