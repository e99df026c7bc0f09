"""Saving and opening by one rank: crashes and refusals at every point, and what remains."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatron import atomic
from megatron.checkpoint.files import durable, store
from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.load import storage
from megatron.checkpoint.sharded import ShardedTensor, Snapshot
from megatron.config.checkpoint import Verification
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

pytestmark = pytest.mark.slow

CTX = ParallelContext.single()
REPOSITORY = Path(__file__).parents[4]
MOST_STEPS = 200  # more than a save of the toy has; a loop beyond it would not end


def save(folder, iteration=100, *, seed=0, **more):
    snapshot = snapshot_at(1, 1, 0, seed=seed, iteration=iteration)
    return storage.save_snapshot(folder, snapshot, iteration=iteration, ctx=CTX, **more)


def load(folder, iteration=None, **more):
    """The latest checkpoint's memory, and its iteration."""
    opened = storage.open_checkpoint(folder, iteration, ctx=CTX, **more)
    target = rank_at(1, 1, 0, seed=None)
    opened.read_into(target.tensors)
    return target, opened.manifest.iteration


def is_whole(folder, seeds):
    """Whether the latest checkpoint is exactly what was saved with the seed of its iteration."""
    target, iteration = load(folder)
    return differences(target, rank_at(1, 1, 0, seed=seeds[iteration])) == []


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path):
    saved = save(tmp_path / "new" / "folder", seed=3)
    assert saved.directory == tmp_path / "new" / "folder" / "iter_0000100"
    content = storage.open_checkpoint(tmp_path / "new" / "folder", ctx=CTX).manifest
    assert content.bytes == saved.bytes
    assert content.progress == {"iteration": 100, "consumed_samples": 800}
    assert content.scalars == {"loss_scale": 4096.0}
    assert content.written_by["torch"] == torch.__version__
    assert is_whole(tmp_path / "new" / "folder", {100: 3})


def test_an_older_iteration_can_be_asked_for(tmp_path):
    save(tmp_path, 1, seed=1)
    save(tmp_path, 2, seed=2)
    target, iteration = load(tmp_path, 1)
    assert (iteration, differences(target, rank_at(1, 1, 0, seed=1))) == (1, [])
    with pytest.raises(CheckpointError, match="iteration 3 is not in"):
        load(tmp_path, 3)


def test_retention_follows_a_save(tmp_path):
    for iteration in (1, 2, 3):
        saved = save(tmp_path, iteration, retention=Retention(2))
    assert saved.retired == (1,)
    assert folders.iterations(tmp_path) == [2, 3]


def test_retention_that_fails_does_not_fail_the_save(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders, "retire", fail)
    assert save(tmp_path, retention=Retention(1)).retired == ()
    assert "could not be removed" in capsys.readouterr().err


class Crash(BaseException):
    """The process ends here; no handler of the library may run."""


def count_down(monkeypatch, steps, error):
    """Raise `error` at step `steps` of those that change the disk; return the steps taken."""
    taken = []

    def wrap(owner, name):
        real = getattr(owner, name)

        def step(*args, **kwargs):
            taken.append(name)
            if len(taken) == steps:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    wrap(durable.DurableFile, "write")
    wrap(atomic, "sync_directory")
    for name in ("fsync", "replace"):
        wrap(os, name)
    for name in ("rename", "mkdir"):
        wrap(Path, name)
    wrap(shutil, "rmtree")
    return taken


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
def test_a_crash_at_any_step_leaves_the_former_checkpoint_or_the_new_one(
    tmp_path, monkeypatch, again
):
    new = 100 if again else 200
    aside = 0
    for step in range(1, MOST_STEPS):
        folder = tmp_path / str(step)
        save(folder, 100, seed=1)
        with monkeypatch.context() as patch:
            taken = count_down(patch, step, Crash())
            try:
                save(folder, new, seed=2)
            except Crash:
                pass
            else:
                break
        if again and not (folder / "iter_0000100").exists():
            aside += 1  # between two renames: readers get an error, and the next save puts it back
            with pytest.raises(CheckpointError, match="is not in the checkpoint folder"):
                load(folder)
        else:
            target, iteration = load(folder)
            matches = [not differences(target, rank_at(1, 1, 0, seed=seed)) for seed in (1, 2)]
            assert any(matches) if again else matches[iteration == 200], (step, taken)
        save(folder, 300, seed=3)
        assert is_whole(folder, {300: 3})
        left = {name for name in os.listdir(folder) if name.startswith(".")}
        assert left == set(), (step, left)
    assert step > 10
    assert aside == (1 if again else 0)


def test_an_error_at_any_step_is_raised_and_leaves_the_former_checkpoint_or_the_new_one(
    tmp_path, monkeypatch, capsys
):
    for step in range(1, MOST_STEPS):
        folder = tmp_path / str(step)
        save(folder, 100, seed=1)
        with monkeypatch.context() as patch:
            taken = count_down(patch, step, OSError(errno.ENOSPC, "No space left on device"))
            try:
                save(folder, 200, seed=2)
            except CheckpointError as error:
                assert "No space left" in str(error)  # noqa: PT017  # every step, not one
            else:
                if len(taken) < step:
                    break
        assert is_whole(folder, {100: 1, 200: 2}), (step, taken)
        left = {name for name in os.listdir(folder) if name.startswith(".")}
        assert left == set(), (step, left)
    assert step > 10


def test_a_limit_on_file_sizes_fails_the_save_and_not_the_process(tmp_path):
    save(tmp_path, 100, seed=1)
    program = """
import resource, sys, torch
from megatron.checkpoint.load import storage
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.sharded import ShardedTensor, Snapshot
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
snapshot = Snapshot((ShardedTensor.of("w", torch.zeros(1 << 16)),), progress={}, config={})
try:
    storage.save_snapshot(sys.argv[1], snapshot, iteration=200, ctx=ParallelContext.single())
except CheckpointError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "EFBIG" in ended.stdout
    assert "ulimit -f" in ended.stdout
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", folders.TRACKER]
    assert is_whole(tmp_path, {100: 1})
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_tracker_that_cannot_be_written_is_said_with_the_checkpoint_kept(tmp_path, monkeypatch):
    save(tmp_path, 100, seed=1)

    def fail(path, data, *, suffix):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable, "replace_file", fail)
    with pytest.raises(CheckpointError, match="is whole, but is not named as the latest") as caught:
        save(tmp_path, 200, seed=2)
    assert "echo 200 >" in caught.value.fix
    assert is_whole(tmp_path, {100: 1})
    assert load(tmp_path, 200)[1] == 200


def test_a_disk_without_room_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    save(tmp_path, 100, seed=1)
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    monkeypatch.setattr(durable.DurableFile, "write", lambda *args: pytest.fail("wrote"))
    with pytest.raises(CheckpointError, match="no room for the next checkpoint"):
        save(tmp_path, 200)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", folders.TRACKER]


def test_a_value_that_cannot_be_stored_fails_the_save_and_leaves_no_stage(tmp_path):
    snapshot = Snapshot((), progress={"loss": float("nan")}, config={})
    with pytest.raises(CheckpointError, match="cannot be written to a checkpoint"):
        storage.save_snapshot(tmp_path, snapshot, iteration=1, ctx=CTX)
    assert os.listdir(tmp_path) == []


def test_a_stage_that_a_rank_does_not_see_is_a_file_system_that_is_not_shared(
    tmp_path, monkeypatch
):
    real = folders.make_stage
    monkeypatch.setattr(
        folders, "make_stage", lambda folder, iteration: real(folder, iteration) / "elsewhere"
    )
    with pytest.raises(CheckpointError, match="rank 0 made for the checkpoint is not there"):
        save(tmp_path)


def test_a_file_that_rank_0_does_not_see_whole_fails_the_save(tmp_path, monkeypatch):
    write = sharded.write

    def lose(directory, snapshot, plan, *, rank):
        part = write(directory, snapshot, plan, rank=rank)
        (directory / next(iter(part.files))).unlink()
        return part

    monkeypatch.setattr(sharded, "write", lose)
    with pytest.raises(CheckpointError, match=r"checkpoint is damaged(.|\n)*no such file"):
        save(tmp_path)
    assert os.listdir(tmp_path) == []


def damaged(folder, damage):
    save(folder, 100)
    directory = folder / "iter_0000100"
    damage(directory)
    return directory


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


SHARD = "shard-00000-of-00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / SHARD, -1), "xxh3"),
        (lambda d: flip(d / "generators-00000.safetensors", -1), "xxh3"),
        (lambda d: flip(d / "manifest.json", 500), "damaged or was edited"),
        (lambda d: os.truncate(d / SHARD, 900), "found 900 bytes"),
        (lambda d: (d / SHARD).unlink(), "no such file"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json: no such file"),
        (lambda d: shutil.copytree(d, d.parent / "iter_0000200"), "of another iteration"),
    ],
)
def test_damage_is_found_before_a_target_is_touched(tmp_path, damage, message):
    damaged(tmp_path, damage)
    if (tmp_path / "iter_0000200").exists():
        (tmp_path / folders.TRACKER).write_text("200")
    target = rank_at(1, 1, 0, seed=None)
    with pytest.raises(CheckpointError) as caught:
        storage.open_checkpoint(tmp_path, ctx=CTX).read_into(target.tensors)
    assert message in str(caught.value)
    assert bool(target.memory["model/norm.weight"].isnan().all())


def test_shards_swapped_between_iterations_are_found(tmp_path):
    save(tmp_path, 100, seed=1)
    save(tmp_path, 200, seed=2)
    one, other = (tmp_path / f"iter_0000{i}00" / SHARD for i in (1, 2))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    with pytest.raises(CheckpointError, match="checkpoint is damaged"):
        load(tmp_path)


def test_lengths_alone_are_checked_when_asked(tmp_path):
    damaged(tmp_path, lambda d: flip(d / SHARD, -1))
    load(tmp_path, verification=Verification.SIZE)
    with pytest.raises(CheckpointError, match="checkpoint is damaged"):
        storage.open_checkpoint(tmp_path, ctx=CTX).verify_all()


def test_a_part_of_the_tensors_can_be_read_but_must_then_be_all_of_that_part(tmp_path):
    save(tmp_path, seed=1)
    opened = storage.open_checkpoint(tmp_path, ctx=CTX)
    target = rank_at(1, 1, 0, seed=None)
    weights = [tensor for tensor in target.tensors if tensor.name.startswith("model/")]
    opened.read_into(weights, prefixes=("model/",))
    with pytest.raises(CheckpointError, match="unexpected: optimizer/exp_avg"):
        opened.read_into(weights)
    with pytest.raises(CheckpointError, match=r"unexpected: model/embedding.word"):
        opened.read_into(weights[1:], prefixes=("model/",))
    extra = ShardedTensor.of("model/norm.bias", torch.zeros(6))
    with pytest.raises(CheckpointError, match=r"missing: model/norm.bias"):
        opened.read_into([*weights, extra], prefixes=("model/",))


def test_files_are_digested_once_however_often_they_are_read(tmp_path, monkeypatch):
    save(tmp_path)
    opened = storage.open_checkpoint(tmp_path, ctx=CTX)
    digested = []
    real = store.digest_of
    monkeypatch.setattr(
        store, "digest_of", lambda path: (digested.append(path.name), real(path))[1]
    )
    target = rank_at(1, 1, 0, seed=None)
    opened.read_into(target.tensors)
    opened.read_into(target.tensors)
    assert opened.read_generators().values == {"rank": 0}
    assert sorted(digested) == sorted(opened.manifest.files)


def test_random_states_that_were_not_saved_are_refused(tmp_path):
    storage.save_snapshot(tmp_path, Snapshot((), progress={}, config={}), iteration=1, ctx=CTX)
    opened = storage.open_checkpoint(tmp_path, ctx=CTX)
    with pytest.raises(CheckpointError, match="no random states for these ranks"):
        opened.read_generators()


def test_a_tracker_behind_the_newest_checkpoint_is_said(tmp_path, capsys):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / folders.TRACKER).write_text("1")
    assert load(tmp_path)[1] == 1
    assert "names iteration 1, but 2 is there too" in capsys.readouterr().err


def test_a_reader_during_saves_sees_a_whole_checkpoint_every_time(tmp_path):
    save(tmp_path, 1, seed=1)
    ended = threading.Event()
    failures = []

    def write():
        try:
            for iteration in range(2, 12):
                save(tmp_path, iteration, seed=iteration)
        except BaseException as error:
            failures.append(error)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seeds = {iteration: iteration for iteration in range(1, 12)}
    reads = 0
    while not ended.is_set() or reads == 0:
        assert is_whole(tmp_path, seeds)
        reads += 1
    writer.join()
    assert failures == []
    assert manifests.load(tmp_path / "iter_0000011")[0].iteration == 11


def test_ranks_and_people_are_told_everything_that_they_must_agree_on(tmp_path):
    save(tmp_path, 100)
    seen = storage._RankView(7, "ab" * 16, 1, manifests.GridLayout(2, 1, 3), "here")
    assert (
        storage._description_of(seen)
        == f"iteration 7, manifest {'ab' * 16}, version 1, tp=2 pp=1 dp=3"
    )


def previous(folder, iteration=None, **how):
    def open_at(at):
        return storage.open_checkpoint(folder, at, ctx=CTX, **how)

    return storage.open_or_previous(folder, iteration, open_at, ctx=CTX).manifest.iteration


def test_a_whole_checkpoint_is_taken_without_a_word(tmp_path, capsys):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    assert previous(tmp_path) == 2
    assert previous(tmp_path, 1) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: flip(d / SHARD, -1),
        lambda d: flip(d / "generators-00000.safetensors", -1),
        lambda d: flip(d / "manifest.json", 500),
        lambda d: os.truncate(d / SHARD, 900),
        lambda d: (d / SHARD).unlink(),
        lambda d: (d / "manifest.json").unlink(),
        shutil.rmtree,
    ],
)
def test_the_newest_whole_one_before_it_is_taken_and_said_loudly(tmp_path, capsys, damage):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, seed=iteration)
    for bad in (2, 3):
        damage(tmp_path / f"iter_000000{bad}")
    assert previous(tmp_path) == 1
    output = capsys.readouterr().err
    assert "*** --load-fallback previous: going on from iteration 1" in output
    assert "iteration 3" in output
    assert ("iteration 2: " in output) == (tmp_path / "iter_0000002").exists()
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_garbled_tracker_is_passed_over_for_the_newest_of_all(tmp_path, capsys):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    for text in ("ten", ""):
        (tmp_path / folders.TRACKER).write_text(text)
        assert previous(tmp_path) == 2
        assert "the tracker file: " in capsys.readouterr().err
    (tmp_path / folders.TRACKER).unlink()
    assert previous(tmp_path) == 2


def test_what_the_tracker_does_not_name_yet_is_not_fallen_back_to(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    (tmp_path / folders.TRACKER).write_text("2")
    flip(tmp_path / "iter_0000002" / SHARD, -1)
    assert previous(tmp_path) == 1


def test_without_a_whole_one_all_reasons_are_told(tmp_path):
    for iteration in (1, 2):
        damaged_at = tmp_path / save(tmp_path, iteration).directory / SHARD
        flip(damaged_at, -1)
    with pytest.raises(CheckpointError, match="no checkpoint in the folder is whole") as caught:
        previous(tmp_path)
    assert "iteration 2: the checkpoint is damaged" in str(caught.value)
    assert "iteration 1: the checkpoint is damaged" in str(caught.value)
    with pytest.raises(CheckpointError, match="does not exist"):
        previous(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="never held a checkpoint"):
        previous(tmp_path / "empty")


def test_lengths_alone_decide_about_falling_back_when_asked(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    flip(tmp_path / "iter_0000002" / SHARD, -1)
    assert previous(tmp_path, verification=Verification.SIZE) == 2
