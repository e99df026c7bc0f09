"""Weights & Biases offline: its own files, read back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from megatron.trackers.wandb import WandbTracker
from tests.unit.trackers.runs import CONFIGS, LOSS, NAME, VALUES, at, tracked_run
from tests.unit.trackers.wandb_files import offline_runs

KEY = "f4ke" * 10


def test_each_start_of_a_run_has_its_name_and_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run = tracked_run(wandb_project="tiny", wandb_exp_name="first", wandb_save_dir=str(tmp_path))
    for step in (3, 2):  # the second start is from an earlier save
        tracker = WandbTracker(run)
        tracker.log_scalars(VALUES, at(step))
        tracker.close()
    wandb.teardown()  # the process that it starts for its runs
    starts = offline_runs(tmp_path)
    assert [(start.project, start.run_id, start.name) for start in starts] == [
        ("tiny", NAME, "first")
    ] * 2
    assert all(start.config["flags"] == CONFIGS["flags"] for start in starts)
    assert [(point["iteration"], point[LOSS]) for start in starts for point in start.points] == [
        (3, 2.5),
        (2, 2.5),
    ]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in content for content in written)


def test_a_key_that_is_absent_or_misshapen_is_said_without_the_key(tmp_path: Path) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    cases: dict[str, dict[str, str]] = {
        "no API key in WANDB_API_KEY": {},
        "WANDB_API_KEY invalid": {"WANDB_API_KEY": "s3cret"},
        "None": {"WANDB_MODE": "offline"},
    }
    program = "from megatron.trackers.wandb import SERVICE; print(SERVICE.problem())"
    started = {
        words: subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment | {"HOME": str(tmp_path)} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, variables in cases.items()
    }
    for words, process in started.items():
        said, _ = process.communicate(timeout=60)
        assert words in said
        assert "s3cret" not in said
        assert process.returncode == 0
