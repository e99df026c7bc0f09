"""An index names existing files of its own folder, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.files import safetensors_index
from megatron.errors import CheckpointError


def _index(folder: Path, content: Any) -> Path:
    path = folder / safetensors_index.NAME
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_tensors_are_found_in_the_order_of_the_index(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    path = _index(tmp_path, {"weight_map": {"x": "a.safetensors", "b": "a.safetensors"}})
    assert list(safetensors_index.read(path)) == ["x", "b"]


def test_files_of_another_kind_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    path = _index(tmp_path, {"weight_map": {"x": "a.bin"}})
    assert safetensors_index.read(path, ".bin") == {"x": "a.bin"}


@pytest.mark.parametrize(
    "file",
    ["../a.safetensors", "/etc/a.safetensors", "b/a.safetensors", "a..safetensors", "a.bin", 3],
)
def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path: Path, file: Any) -> None:
    path = _index(tmp_path, {"weight_map": {"x": file}})
    with pytest.raises(CheckpointError, match="damaged or was made up") as caught:
        safetensors_index.read(path)
    assert "may lead out of its folder" in str(caught.value.found)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    path = _index(tmp_path, {"weight_map": {"x": "a.safetensors"}})
    with pytest.raises(CheckpointError, match="lacks files that its index names") as caught:
        safetensors_index.read(path)
    assert "a.safetensors" in str(caught.value.found)
    with pytest.raises(CheckpointError, match="the index of a checkpoint is missing"):
        safetensors_index.read(tmp_path / "none.json")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"a": 1, "a": 2}'])
def test_what_is_no_index_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match="damaged or was made up"):
        safetensors_index.read(_index(tmp_path, content))
