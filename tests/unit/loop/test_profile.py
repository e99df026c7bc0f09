"""Which steps are recorded, and when a recording begins, ends and is written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import log
from megatron.config.runtime import LoggingConfig
from megatron.errors import MachineError
from megatron.loop.overlap import read_trace
from megatron.loop.profile import Profile
from megatron.mpu.context import Group, ParallelContext
from megatron.progress import Progress

WORLD = ParallelContext.single().world


def flags(folder: Path, **others: Any) -> LoggingConfig:
    values = {"profile_step_start": 2, "profile_step_end": 4} | others
    return LoggingConfig(profile=True, profile_dir=str(folder), **values)


def steps(profile: Profile, first: int, last: int) -> None:
    """Do what the loop does with the steps `first` to `last`, counted from 1."""
    for number in range(first, last + 1):
        with profile.step(number - 1):
            torch.ones(2).add(1)
        profile(Progress(iteration=number), None)


def recorded(folder: Path) -> dict[str, list[str]]:
    """The steps in each trace."""
    return {
        path.name: sorted(
            event["name"] for event in read_trace(path) if event["name"].startswith("step ")
        )
        for path in folder.glob("*")
    }


def test_the_steps_between_beginning_and_end_are_recorded_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure(0, 1)
    with Profile(flags(tmp_path), WORLD) as profile:
        steps(profile, 1, 6)
    assert recorded(tmp_path) == {"rank0-step3-4.pt.trace.json.gz": ["step 3", "step 4"]}
    assert "steps 3 to 4 of rank 0 are in " in capsys.readouterr().out


def test_no_step_runs_at_both_ends_of_a_recording(tmp_path: Path) -> None:
    with Profile(flags(tmp_path), WORLD) as profile:
        waits = [profile.precedes_next_step(Progress(iteration=done)) for done in range(5)]
        assert waits == [False, False, True, False, True]
        steps(profile, 1, 4)
        assert not profile.precedes_next_step(Progress(iteration=5))
    assert not Profile(LoggingConfig(), WORLD).precedes_next_step(Progress(iteration=10))


def test_a_run_that_is_resumed_in_between_records_the_rest(tmp_path: Path) -> None:
    with Profile(flags(tmp_path), WORLD) as profile:
        steps(profile, 4, 5)
    assert recorded(tmp_path) == {"rank0-step4-4.pt.trace.json.gz": ["step 4"]}


def test_a_last_step_that_is_skipped_does_not_lengthen_the_recording_further(
    tmp_path: Path,
) -> None:
    with Profile(flags(tmp_path), WORLD) as profile:
        steps(profile, 3, 3)
        assert profile.precedes_next_step(Progress(iteration=5))
        steps(profile, 5, 6)
    assert list(recorded(tmp_path)) == ["rank0-step3-5.pt.trace.json.gz"]


def test_what_was_recorded_before_an_end_in_between_is_written(tmp_path: Path) -> None:
    with Profile(flags(tmp_path), WORLD) as profile:
        steps(profile, 3, 3)
    assert recorded(tmp_path) == {"rank0-step3-cut.pt.trace.json.gz": ["step 3"]}


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    other = Group(ranks=(0, 1), rank=1)
    with Profile(flags(tmp_path), other) as profile, profile.step(2) as begun:
        assert begun is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    name = tmp_path / "rank0-step3-4.pt.trace.json.gz"
    name.mkdir()
    cannot = pytest.raises(MachineError, match="cannot write")
    with Profile(flags(tmp_path), WORLD) as profile, cannot:
        steps(profile, 3, 4)
    assert list(tmp_path.iterdir()) == [name]
