"""Local checkpoints of a run of one process: what it goes on from, and what it passes over."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.folder import run_folder
from megatron.checkpoint.local import checkpoints
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.local.folder import LocalFolder
from megatron.checkpoint.local.layout import newest_iteration
from megatron.checkpoint.save.saving import save_snapshot
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

CTX = ParallelContext.single()
FLAGS: Mapping[str, Any] = {"model": {"hidden_size": 6}}


class Run:
    """A run that saves in one folder, and locally in another one."""

    def __init__(self, place: Path) -> None:
        self.save, self.root = place / "save", place / "memory"

    def start(self) -> LocalCheckpoints:
        return LocalCheckpoints(self.root, self.save, CTX)

    def save_locally(self, iteration: int) -> None:
        self.start().save(snapshot_at(1, 1, 0, seed=iteration), iteration)

    def save_persistently(self, iteration: int) -> None:
        save_snapshot(self.save, snapshot_at(1, 1, 0), iteration=iteration, ctx=CTX)

    def newest(self, flags: Mapping[str, Any] = FLAGS) -> int | None:
        opened = self.start().newest(flags)
        return None if opened is None else opened.manifest.iteration

    def file(self, iteration: int) -> Path:
        (found,) = self.root.glob(f"*/rank-*/iter_{iteration:07d}/shard*")
        return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_goes_on_from_the_newest_with_every_bit(run: Run) -> None:
    for iteration in (3, 4):
        run.save_locally(iteration)
    local = run.start()
    opened = local.newest(FLAGS)
    assert opened is not None
    assert local.went_on
    found = rank_at(1, 1, 0, seed=None)
    opened.read_into(found.tensors)
    assert differences(found, rank_at(1, 1, 0, seed=4)) == []
    assert opened.read_generators().values == {"rank": 0}
    assert opened.manifest.scalars == {"loss_scale": 4096.0}
    assert len(list(run.root.glob("*/rank-*/iter_*"))) == 1, "the former one is kept"


def test_one_that_is_older_than_what_is_saved_is_passed_over(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save_locally(3)
    run.save_persistently(3)
    assert run.newest() == 3
    run.save_persistently(5)
    assert run.newest() is None
    assert "is older than iteration 5 in --save" in capsys.readouterr().err


def test_a_run_that_was_set_back_by_hand_begins_where_it_was_set_to(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save_persistently(2)
    run.save_persistently(4)
    run.save_locally(5)
    (run.save / run_folder.TRACKER).write_text("2\n")
    assert run.newest() is None
    assert "had saved iteration 4, which is gone from --save" in capsys.readouterr().err


def test_a_run_with_other_flags_does_not_go_on_from_it(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save_locally(3)
    assert run.newest({"model": {"hidden_size": 8}}) is None
    assert "is of a run with another --hidden-size" in capsys.readouterr().err
    assert run.newest({"model": {"hidden_size": 6}, "training": {"seed": 1}}) is None


def test_a_folder_that_was_emptied_is_another_run(run: Run) -> None:
    run.save_locally(3)
    (run.save / run_folder.RUN_ID).unlink()
    assert run.newest() is None
    assert newest_iteration(run.root, run.save) is None


def test_a_damaged_one_is_passed_over_and_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save_locally(3)
    file = run.file(3)
    broken = bytearray(file.read_bytes())
    broken[-1] ^= 1
    file.write_bytes(broken)
    assert run.newest() is None
    assert str(file) in capsys.readouterr().err


def test_a_save_that_fails_leaves_the_former_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save_locally(3)

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device", "memory")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "put_in_place", full)
        with pytest.raises(CheckpointError, match="No space left"):
            run.save_locally(4)
    assert run.newest() == 3


def test_it_is_gone_once_the_run_has_saved_its_last_state(run: Run) -> None:
    run.save_locally(3)
    run.start().remove()
    assert not run.root.exists()


def test_a_node_without_room_is_refused_before_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = snapshot_at(1, 1, 0).tensors
    run.start().reserve(tensors)
    monkeypatch.setattr(LocalFolder, "room", lambda folder: 1 << 20)
    with pytest.raises(ConfigError, match=r"2,10\d,\d+ bytes for two of each of 1 ranks"):
        run.start().reserve(tensors)


def test_a_copy_beside_its_original_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.recovery, "holders", lambda *about: [(0, 0)])
    with pytest.raises(ConfigError, match="would be lost together with it"):
        LocalCheckpoints(run.root, run.save, CTX, jump=1, factor=2)


def test_the_id_of_a_run_stays_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    first = run_folder.run_id(tmp_path / "save")
    assert run_folder.run_id(tmp_path / "save") == first
    assert run_folder.run_id(tmp_path / "other") != first
    (tmp_path / "save" / run_folder.RUN_ID).write_text("rubbish")
    with pytest.raises(CheckpointError, match="'rubbish'"):
        run_folder.run_id(tmp_path / "save")
