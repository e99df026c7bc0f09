"""The steps of a save: what is read back, what is logged, what older checkpoints depend on.

What is left after an end at any step is in test_storage.py.
"""

from pathlib import Path

import pytest

from megatron.checkpoint.files import store
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder import verify
from megatron.checkpoint.folder.manifest import load
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.save import saving
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import snapshot_at

CTX = ParallelContext.single()


def save(folder, iteration=100, **more):
    snapshot = snapshot_at(1, 1, 0, iteration=iteration)
    return saving.save_snapshot(folder, snapshot, iteration=iteration, ctx=CTX, **more)


def test_a_save_says_where_how_much_and_how_long():
    saved = saving.Saved(7, Path("/run/iter_0000007"), 3 << 20, 2.0, 2.0, ())
    assert str(saved) == (
        "successfully saved checkpoint at iteration 7 to /run/iter_0000007 (3.0 MiB in 2.0 s)"
    )
    beside = str(saved._replace(stalled=0.25))
    assert beside.endswith("(3.0 MiB in 2.0 s, for 0.25 s of which training stood still)")


def test_what_makes_older_ones_redundant_is_read_back_first(tmp_path, monkeypatch):
    read = []
    real = store.digest_of

    def note(path, **how):
        read.append((path.name, how))
        return real(path, **how)

    monkeypatch.setattr(store, "digest_of", note)
    save(tmp_path, 1)
    assert read == [], "nothing is to be deleted"
    save(tmp_path, 2, retention=Retention(1))
    assert [name for name, _ in read] == [
        "shard-00000-of-00001.safetensors",
        "generators-00000.safetensors",
    ]
    assert all(how == {"from_disk": True} for _, how in read)
    assert folders.iterations(tmp_path) == [2]


def test_a_disk_that_holds_something_else_fails_the_save_and_older_ones_stay(tmp_path, monkeypatch):
    save(tmp_path, 1)
    write = sharded.write

    def flip(directory, snapshot, plan, *, rank):
        part = write(directory, snapshot, plan, rank=rank)
        path = directory / "shard-00000-of-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return part

    monkeypatch.setattr(sharded, "write", flip)
    with pytest.raises(CheckpointError, match="does not hold what was just written") as caught:
        save(tmp_path, 2, retention=Retention(1))
    assert "shard-00000-of-00001.safetensors: expected" in str(caught.value)
    assert folders.iterations(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_validation_loss_is_kept_with_the_weights_it_is_of(tmp_path):
    from dataclasses import replace

    losses = {1: 3.0, 2: 1.25, 3: None, 4: 2.0}
    for iteration, loss in losses.items():
        snapshot = replace(snapshot_at(1, 1, 0, iteration=iteration), validation_loss=loss)
        rule = Retention(1, best=1)
        saving.save_snapshot(tmp_path, snapshot, iteration=iteration, ctx=CTX, retention=rule)
    assert folders.iterations(tmp_path) == [2, 4]
    assert load(tmp_path / "iter_0000002")[0].validation_loss == 1.25
    assert (
        verify.wrong_digests(
            tmp_path / "iter_0000002",
            load(tmp_path / "iter_0000002")[0],
            ["generators-00000.safetensors"],
        )
        == []
    )
