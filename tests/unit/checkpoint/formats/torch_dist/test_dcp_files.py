"""What is written as torch writes it is loaded by torch, is read in turn, and is durable."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

from megatron.checkpoint.files import durable
from megatron.checkpoint.formats.torch_dist import dcp_files
from megatron.checkpoint.source import TensorDescription

TENSORS = {"a": torch.arange(24.0).view(2, 3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
DESCRIBED = {
    "a": TensorDescription("F32", (2, 3, 4)),
    "b": TensorDescription("BF16", (5,)),
}


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    read: list[str] = []

    def element(key: str) -> Tensor:
        read.append(key)
        return TENSORS[key]

    dcp_files.write(tmp_path, DESCRIBED, {"x/shard_0_1": {"n": 1}}, element)
    assert sorted(read) == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]
    state: dict[str, Any] = {
        **{key: torch.zeros_like(tensor) for key, tensor in TENSORS.items()},
        "x/shard_0_1": [None],
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    load_by_torch(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    for key, tensor in TENSORS.items():
        assert torch.equal(state[key], tensor)
    assert planner.state_dict["x/shard_0_1"] == [{"n": 1}]


def test_every_file_is_on_the_disk_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    dcp_files.write(tmp_path, DESCRIBED, {}, TENSORS.__getitem__)
    assert len(synced) == 2
    assert synced[0] == "__0_0.distcp"
    assert synced[1].startswith(".metadata")


def test_a_full_disk_is_said_as_the_disk_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file._path))

    monkeypatch.setattr(durable.DurableFile, "write", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        dcp_files.write(tmp_path, DESCRIBED, {}, TENSORS.__getitem__)
    assert error.value.filename == str(tmp_path / "__0_0.distcp")
