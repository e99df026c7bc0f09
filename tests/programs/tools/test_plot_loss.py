"""plot_loss.py: the points of a run's events, and a picture of them."""

import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron.errors import DataError
from tests.support.launch import ROOT, run_program, unfinished
from tools.plot_loss import TRAIN, VALID, read_curves

PLOT = str(ROOT / "tools" / "plot_loss.py")
PNG = b"\x89PNG\r\n\x1a\n"


def write_events(folder: Path, points: Mapping[str, Mapping[int, float]], *, at: int) -> None:
    """One event file, as a run writes it, last changed at second `at`."""
    with SummaryWriter(str(folder), filename_suffix=f".{at}") as writer:
        for tag, values in points.items():
            for step, value in values.items():
                writer.add_scalar(tag, value, step)
    (file,) = folder.glob(f"*.{at}")
    os.utime(file, (at, at))


def test_a_run_becomes_a_picture(tmp_path: Path) -> None:
    losses = {step: 9.0 - 0.1 * step for step in range(1, 41)}
    write_events(tmp_path / "events", {TRAIN: losses, VALID: {20: 7.5, 40: 6.0}}, at=1)
    picture = tmp_path / "loss.png"
    words = [sys.executable, PLOT, "--tensorboard-dir", "events", "--output", "loss.png"]
    ended = run_program(words, cwd=tmp_path)
    assert (ended.status, ended.out) == (0, "wrote loss.png\n"), ended.text
    content = picture.read_bytes()
    assert content.startswith(PNG)
    assert struct.unpack(">II", content[16:24]) == (960, 540)
    assert not unfinished(tmp_path)


def test_a_resumed_run_counts_its_newer_points(tmp_path: Path) -> None:
    write_events(tmp_path, {TRAIN: {1: 5.0, 2: 4.0, 3: 3.5}}, at=1)
    write_events(tmp_path, {TRAIN: {3: 3.0, 4: 2.0}, VALID: {4: 2.5}}, at=2)
    curves = read_curves(tmp_path, (TRAIN, VALID))
    assert curves[TRAIN] == ([1, 2, 3, 4], [5.0, 4.0, 3.0, 2.0])
    assert curves[VALID] == ([4], [2.5])


def test_a_folder_without_losses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no loss values to draw") as caught:
        read_curves(tmp_path, (TRAIN, VALID))
    assert str(tmp_path) in str(caught.value.found)
