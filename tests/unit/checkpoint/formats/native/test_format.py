"""Runs save our own format at once, or in the background if configured."""

from pathlib import Path

from megatron.checkpoint.folder.retention import KEEP_ALL
from megatron.checkpoint.folder.run_folder import iterations
from megatron.checkpoint.formats.format import RunSave
from megatron.checkpoint.formats.native.format import FORMAT
from megatron.checkpoint.formats.native.sharded import NAME
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.config.checkpoint import MegatronNames
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import snapshot_at

CTX = ParallelContext.single()


def save(folder: Path, background: BackgroundSaves | None) -> RunSave:
    return RunSave(
        folder=str(folder),
        snapshot=snapshot_at(1, 1, 0, iteration=4),
        iteration=4,
        ctx=CTX,
        retention=KEEP_ALL,
        num_chunks=1,
        padded_rows=1,
        megatron_names=MegatronNames.LEGACY,
        live=lambda: None,
        background=background,
    )


def test_a_save_is_told_of_when_it_is_over(tmp_path: Path) -> None:
    assert FORMAT.save_run is not None
    saved = FORMAT.save_run(save(tmp_path, None))
    assert saved is not None
    assert (saved.iteration, saved.directory) == (4, tmp_path / "iter_0000004")


def test_a_save_beside_the_training_is_told_of_by_who_waits_for_it(tmp_path: Path) -> None:
    assert FORMAT.save_run is not None
    with BackgroundSaves(CTX) as saves:
        assert FORMAT.save_run(save(tmp_path, saves)) is None
        saved = saves.wait()
    assert saved is not None
    assert iterations(tmp_path) == [4]


def test_it_is_the_one_that_a_manifest_tells(tmp_path: Path) -> None:
    assert FORMAT.name == NAME
    assert not FORMAT.recognise(tmp_path)
    (tmp_path / "manifest.json").write_text("damaged, and ours all the same")
    assert FORMAT.recognise(tmp_path)
