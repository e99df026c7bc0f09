"""A path leads to one checkpoint of one format, or to an error that lists the content."""

from pathlib import Path

import pytest

from megatron.checkpoint.formats import registry
from megatron.checkpoint.load import storage
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.context import ParallelContext
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.unit.checkpoint.toy import snapshot_at


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    for iteration in (5, 10):
        snapshot = snapshot_at(1, 1, 0, iteration=iteration)
        storage.save_snapshot(tmp_path, snapshot, iteration=iteration, ctx=ParallelContext.single())
    return tmp_path


@pytest.fixture
def megatron_folder(tmp_path: Path) -> Path:
    save_megatron(tmp_path, whole_model(Shape()), Shape())
    return tmp_path


def test_a_folder_of_ours_and_one_iteration_of_it_are_found(ours: Path) -> None:
    assert registry.locate(ours) == ours / "iter_0000010"
    assert registry.locate(ours, 5) == ours / "iter_0000005"
    assert registry.locate(ours / "iter_0000005") == ours / "iter_0000005"
    with registry.open_source(ours) as source:
        assert (source.format_name, source.progress["iteration"]) == ("sharded", 10)


def test_a_folder_of_megatrons_and_its_release_are_found(megatron_folder: Path) -> None:
    with registry.open_source(megatron_folder) as source:
        assert source.format_name == "megatron"
    (megatron_folder / "iter_0000010").rename(megatron_folder / "release")
    (megatron_folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    with registry.open_source(megatron_folder) as source:
        assert source.progress == {}
    (megatron_folder / "release").rename(megatron_folder / "iter_0000010")
    with pytest.raises(CheckpointError, match="names a release checkpoint that is not there"):
        registry.open_source(megatron_folder)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, ours: Path) -> None:
    with pytest.raises(CheckpointError, match="iteration 7 is not in the checkpoint folder"):
        registry.locate(ours, 7)
    with pytest.raises(CheckpointError, match="does not exist"):
        registry.locate(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="has never held a checkpoint"):
        registry.locate(empty)
    (ours / "iter_0000010" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000010/manifest\.json: no such file"):
        registry.open_source(ours)
    for path in (ours / "iter_0000010").iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint that this program reads") as caught:
        registry.open_source(ours)
    assert "sharded, megatron" in caught.value.fix


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "none", ""])
def test_a_tracker_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "latest").write_text(name)
    with pytest.raises(CheckpointError, match="names a folder that is not beside it"):
        registry.locate(tmp_path / "run")


def test_formats_have_names_and_can_be_asked_for() -> None:
    for form in registry.FORMATS:
        assert registry.get(form.name) is form
    assert {"sharded", "megatron"} <= set(registry.writable())
    with pytest.raises(CheckpointError, match="no such checkpoint format"):
        registry.get("zip")
    assert registry.recognise(Path("/nowhere")) is None


def test_nothing_is_written_over_what_is_read(tmp_path: Path) -> None:
    registry.refuse_overlap(tmp_path / "a", tmp_path / "b")
    for save in ("a", "a/b", "."):
        with pytest.raises(ConfigError, match="written over, or into, the one that is read"):
            registry.refuse_overlap(tmp_path / "a", tmp_path / save)
