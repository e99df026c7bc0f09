"""When one process stops; what several agree on is tested with several."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.config.training import TrainingConfig
from megatron.loop.stop import StopConditions
from megatron.mpu.context import Group
from megatron.progress import BatchSchedule, Duration, Progress

ALONE = Group(ranks=(0,), rank=0)
TEN = Duration(BatchSchedule(1, 1, 1), train_iters=10)


def conditions(**flags: Any) -> StopConditions:
    return StopConditions(TrainingConfig(micro_batch_size=1, train_iters=10, **flags), TEN, ALONE)


def test_the_end_of_the_training_comes_first() -> None:
    stop = conditions(exit_interval=5, exit_duration_in_mins=1e-9)
    assert stop.reason(Progress(iteration=10), steps_done=3) == (
        "training is complete at iteration 10"
    )


def test_an_exit_interval_needs_a_step_of_this_process() -> None:
    stop = conditions(exit_interval=5)
    assert stop.reason(Progress(iteration=5), steps_done=0) is None
    assert stop.reason(Progress(iteration=4), steps_done=4) is None
    assert stop.reason(Progress(iteration=5), steps_done=1) == "exiting program at iteration 5"


def test_a_kill_switch_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    stop = conditions(kill_switch_path=str(path))
    assert stop.reason(Progress(), steps_done=0) is None
    path.touch()
    assert stop.reason(Progress(), steps_done=0) == f"Detected kill switch at {path}. Exiting"


def test_a_duration_ends_a_run() -> None:
    assert conditions(exit_duration_in_mins=60.0).reason(Progress(), steps_done=0) is None
    stop = conditions(exit_duration_in_mins=1e-9)
    assert stop.reason(Progress(), steps_done=1) == "exiting program after 1e-09 minutes"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_for_an_end_while_listening_and_then_no_more(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = conditions()
    with stop.listening():
        assert stop.reason(Progress(), steps_done=0) is None
        os.kill(os.getpid(), number)
        reason = stop.reason(Progress(), steps_done=0)
        assert reason == f"{number.name} was received; exiting program"
    assert signal.getsignal(number) is before


def test_without_the_handler_sigterm_stays_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with conditions(exit_signal_handler=False).listening():
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_goes_with_an_error_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), conditions().listening():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before
