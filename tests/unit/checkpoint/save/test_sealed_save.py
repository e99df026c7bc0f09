"""The end of a save in another framework's layout: sealed, in place, or nothing of it left."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint.files import torch_file
from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.folder.retention import KEEP_ALL, Retention
from megatron.checkpoint.save.saving import Saved
from megatron.checkpoint.save.sealed_save import SealedSave
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import snapshot_at

NAME = "mp_rank_00/model_optim_rng.pt"


def begun(folder: Path, iteration: int, *, retention: Retention = KEEP_ALL) -> SealedSave:
    """A save of one rank that has its stage."""
    folder.mkdir(exist_ok=True)
    return SealedSave(
        ctx=ParallelContext.single(),
        stage=folders.make_stage(folder, iteration),
        snapshot=snapshot_at(1, 1, 0, iteration=iteration),
        iteration=iteration,
        retention=retention,
        started=time.monotonic(),
    )


def one_file(save: SealedSave) -> Mapping[str, FileRecord]:
    """What another framework would write."""
    (save.stage / NAME).parent.mkdir()
    return {NAME: torch_file.save(save.stage / NAME, [save.iteration])}


def completed(folder: Path, iteration: int, *, retention: Retention = KEEP_ALL) -> Saved:
    save = begun(folder, iteration, retention=retention)
    return save.complete(
        lambda: one_file(save), commit=lambda: folders.commit(save.stage, iteration)
    )


def test_what_is_in_place_is_sealed_with_every_file_and_all_random_states(tmp_path: Path) -> None:
    saved = completed(tmp_path, 7)
    assert saved.directory == tmp_path / "iter_0000007"
    content = manifest.load_seal(tmp_path / "iter_0000007")
    assert content is not None
    assert content.generators == ("generators-00000.safetensors",)
    assert set(content.files) == {NAME, *content.generators}
    assert (content.iteration, content.progress["consumed_samples"]) == (7, 56)
    assert saved.bytes == content.bytes
    assert folders.latest_iteration(tmp_path) == 7


def test_older_ones_go_once_the_new_one_was_read_back(tmp_path: Path) -> None:
    for iteration in (1, 2):
        completed(tmp_path, iteration)
    assert completed(tmp_path, 3, retention=Retention(1)).retired == (2, 1)

    def other(path: Path, **how: object) -> tuple[int, str]:
        return 5, "0" * 32

    with (
        patch.object(verify.store, "digest_of", other),
        pytest.raises(CheckpointError, match="does not hold what was just written"),
    ):
        completed(tmp_path, 4, retention=Retention(1))
    assert sorted(os.listdir(tmp_path)) == ["iter_0000003", folders.TRACKER]


def test_what_is_not_as_it_should_be_leaves_nothing(tmp_path: Path) -> None:
    completed(tmp_path, 1)
    save = begun(tmp_path, 2)

    def other_than_the_run() -> None:
        raise CheckpointError("it is another", found="model/w", fix="report it")

    with pytest.raises(CheckpointError, match="it is another"):
        save.complete(lambda: one_file(save), commit=Path, check=other_than_the_run)
    save = begun(tmp_path, 2)
    with pytest.raises(CheckpointError, match=f"{NAME}: expected 9 bytes, found no such file"):
        save.complete(lambda: {NAME: FileRecord(9, "0" * 32)}, commit=Path)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", folders.TRACKER]
