"""TensorBoard's axes; that its tags are those of Megatron is in tests/unit/loop/test_report.py."""

import dataclasses
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config.runtime import LoggingConfig
from megatron.trackers.tensorboard import TensorBoard
from tests.unit.trackers.runs import LOSS, SAMPLES, at, tracked_run


def test_a_loss_has_three_axes_and_consumed_samples_two(tmp_path: Path) -> None:
    tracker = TensorBoard(tracked_run(LoggingConfig(tensorboard_dir=str(tmp_path))))
    tracker.log_scalars({LOSS: 2.5, SAMPLES: 24.0}, at(3))
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    points = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert points == {
        LOSS: [(3, 2.5)],
        f"{LOSS} vs samples": [(24, 2.5)],
        f"{LOSS} vs tokens": [(384, 2.5)],
        SAMPLES: [(3, 24.0)],
        "steps-vs-samples/y=steps,x=samples": [(24, 3.0)],
    }
    assert events.Tags()["tensors"] == ["flags/text_summary"]


def test_points_after_the_save_that_a_run_continues_from_are_hidden(tmp_path: Path) -> None:
    first = tracked_run(LoggingConfig(tensorboard_dir=str(tmp_path)))
    for run, steps in ((first, (1, 2, 3)), (dataclasses.replace(first, first_iteration=2), (2,))):
        tracker = TensorBoard(run)
        for step in steps:
            tracker.log_scalars({LOSS: 10.0 * run.first_iteration + step}, at(step))
        tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars(LOSS)] == [(1, 11.0), (2, 22.0)]
