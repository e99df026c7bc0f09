"""The calls to trackio, against a stand-in for its large library."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.trackers.trackio import TrackioTracker
from tests.unit.trackers.runs import CONFIGS, NAME, VALUES, at, tracked_run


def test_a_run_is_continued_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def init(**asked: Any) -> SimpleNamespace:
        calls.append(("init", asked))
        return SimpleNamespace(
            log=lambda values, step: calls.append(("log", values, step)),
            finish=lambda: calls.append(("finish",)),
        )

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    tracker = TrackioTracker(tracked_run(trackio_project="tiny"))
    tracker.log_scalars(VALUES, at(3))
    tracker.close()
    (_, asked), *rest = calls
    assert asked == {
        "project": "tiny",
        "name": NAME,
        "resume": "allow",
        "config": CONFIGS,
        "auto_log_cpu": False,
        "auto_log_gpu": False,
    }
    assert rest == [("log", VALUES, 3), ("finish",)]
