"""Of each kind of work the rank is named that needed most memory in it."""

import pytest

from megatron import log
from megatron.loop.memory_marks import announce_memory, memory_line
from megatron.mpu.context import ParallelContext
from megatron.peers.activity import EVALUATION, Activity

GIB = 2**30


def test_the_line_has_the_highest_mark_of_each_section() -> None:
    marks = [{"start": GIB, "step": 3 * GIB}, {"start": 2 * GIB, "step": 5 * GIB // 2, "save": GIB}]
    assert memory_line(marks) == (
        "memory high-water marks (GiB), where they rose | start 2.00 (rank 1) | step 3.00 (rank 0) "
        "| save 1.00 (rank 1)"
    )


def test_marks_are_logged_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lines.append)
    world = ParallelContext.single().world
    announce_memory(Activity(), world)
    assert lines == []
    peaks = iter([GIB, GIB, 4 * GIB, 4 * GIB])
    activity = Activity(lambda: next(peaks))
    activity.step(1)
    with activity.during(EVALUATION):
        pass
    announce_memory(activity, world)
    assert [line.partition(" | ")[2] for line in lines] == [
        "start 1.00 (rank 0) | evaluation 4.00 (rank 0)"
    ]
