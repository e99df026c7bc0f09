"""Nodes with disks of their own are distinguished from nodes that share one, before training."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.checkpoint.folder.shared_view import refuse_separate_disks
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks


def look(folders: list[str], patience_s: float) -> str:
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    try:
        refuse_separate_disks(folders[ctx.rank], ctx, patience_s=patience_s)
    except CheckpointError as error:
        return str(error)
    return ""


def test_one_folder_is_fine_and_is_left_as_it_was(tmp_path: Path) -> None:
    save = tmp_path / "new" / "run"
    assert run_on_ranks(2, look, [str(save)] * 2, 10.0) == ["", ""]
    assert os.listdir(tmp_path) == []
    save.mkdir(parents=True)
    assert run_on_ranks(2, look, [str(save)] * 2, 10.0) == ["", ""]
    assert os.listdir(save) == []


def test_ranks_with_another_disk_are_named_on_every_rank(tmp_path: Path) -> None:
    folders = [str(tmp_path / name / "run") for name in ("a", "a", "b")]
    for message in run_on_ranks(3, look, folders, 0.0):
        assert "the nodes do not see one folder for checkpoints" in message
        assert "not there for 1 of 3 ranks, the first of them rank 2" in message
        assert "s3://" in message
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said_everywhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for message in run_on_ranks(2, look, [str(tmp_path / "file" / "run")] * 2, 0.0):
        assert "writing to the folder for checkpoints" in message
        assert "Not a directory" in message


def test_a_file_that_comes_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, hidden = Path.exists, threading.Event()
    monkeypatch.setattr(
        Path, "exists", lambda path: real(path) and (hidden.is_set() or ".seen-" not in path.name)
    )
    timer = threading.Timer(0.5, hidden.set)
    timer.start()
    began = time.monotonic()
    refuse_separate_disks(str(tmp_path), ParallelContext.single(), patience_s=30.0)
    timer.join()
    assert time.monotonic() - began >= 0.5
    assert os.listdir(tmp_path) == []
