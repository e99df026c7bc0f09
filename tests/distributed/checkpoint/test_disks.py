"""Disks that are full, closed, or fail: one error on all ranks, and the former checkpoint."""

import errno
import os
import re
from unittest.mock import patch

import pytest

from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.load import storage
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.checkpoints.small_disk import read_only, small_disk
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

RANKS = 2


def save(folder, ctx, iteration, *, beside):
    snapshot = snapshot_at(1, RANKS, ctx.rank, seed=iteration, iteration=iteration)
    if not beside:
        storage.save_snapshot(folder, snapshot, iteration=iteration, ctx=ctx)
        return
    with BackgroundSaves(ctx) as saves:
        saves.start(folder, snapshot, iteration=iteration)
        saves.wait()


def save_until_it_fails(folder, beside, full=None):
    """Save 100, then 200 where that cannot work; return the error."""
    ctx = ParallelContext.build(Topology(dp=RANKS))
    with patch.object(folders, "require_space"):  # it would find that out before
        if not folders.iterations(folder):
            save(folder, ctx, 100, beside=beside)
        try:
            if full is None:
                save(folder, ctx, 200, beside=beside)
            else:
                with patch.object(durable.os, "fsync", side_effect=full):
                    save(folder, ctx, 200, beside=beside)
        except CheckpointError as error:
            return str(error)
    return "no error"


def loaded(folder):
    target = rank_at(1, 1, 0, seed=None)
    opened = storage.open_checkpoint(folder, ctx=ParallelContext.single())
    opened.read_into(target.tensors)
    iteration = opened.manifest.iteration
    assert differences(target, rank_at(1, 1, 0, seed=iteration)) == []
    return iteration


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
def test_a_disk_that_fills_up_is_the_same_error_on_every_rank(tmp_path, beside):
    full = OSError(errno.ENOSPC, "No space left on device")
    refused = []
    with small_disk(tmp_path / "disk", kib=36, otherwise=lambda: refused.append(full)) as disk:
        fault = refused[0] if refused else None
        messages = run_on_ranks(RANKS, save_until_it_fails, disk / "run", beside, fault)
        assert messages[0] == messages[1]
        assert "failed while writing the checkpoint of iteration 200" in messages[0]
        assert "ENOSPC" in messages[0]
        assert "free space there, or save to another disk" in messages[0]
        assert sorted(os.listdir(disk / "run")) == ["iter_0000100", folders.TRACKER]
        assert loaded(disk / "run") == 100


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
def test_a_disk_that_fails_only_when_it_is_synced_is_found(tmp_path, beside):
    fault = OSError(errno.EIO, "Input/output error")
    messages = run_on_ranks(RANKS, save_until_it_fails, tmp_path / "run", beside, fault)
    assert messages[0] == messages[1]
    # Beside training, the first rank to fail may cancel the other before its own disk fails it.
    failed = r"(ranks 0, 1|rank [01])" if beside else "ranks 0, 1"
    doing = "of 2 failed while writing the checkpoint of iteration 200"
    assert re.search(rf"{failed} {doing}", messages[0]), messages[0]
    assert re.search(r"EIO at .*shard-0000[01]-of-00002\.safetensors", messages[0]), messages[0]
    assert sorted(os.listdir(tmp_path / "run")) == ["iter_0000100", folders.TRACKER]
    assert loaded(tmp_path / "run") == 100


@pytest.mark.parametrize("beside", [False, True], ids=["waits", "beside"])
def test_a_folder_that_nobody_may_write_to_is_refused_before_a_byte(tmp_path, beside):
    folder = tmp_path / "run"
    storage.save_snapshot(
        folder,
        snapshot_at(1, 1, 0, seed=100, iteration=100),
        iteration=100,
        ctx=ParallelContext.single(),
    )
    with patch.object(durable.os, "fsync", os.fsync), read_only(folder, otherwise=lambda: None):
        error = folders.probe_writable(folder)
        assert "Read-only file system" in str(error) or "Permission denied" in str(error)
        messages = run_on_ranks(RANKS, save_until_it_fails, folder, beside)
        assert messages[0] == messages[1]
        assert "failed while making room for the checkpoint" in messages[0]
        assert str(folder) in messages[0]
    assert sorted(os.listdir(folder)) == ["iter_0000100", folders.TRACKER]
    assert loaded(folder) == 100
