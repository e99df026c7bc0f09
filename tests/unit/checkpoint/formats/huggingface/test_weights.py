"""Files and index: what does not agree, leads out of the folder, or is no tensor is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.huggingface.weights import open_weights
from megatron.errors import CheckpointError

A, B = torch.arange(12.0).reshape(3, 4), torch.arange(5.0)


def two_shards(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    save_file({"a": A}, folder / "model-1.safetensors")
    save_file({"b": B}, folder / "model-2.safetensors")
    weight_map = weight_map or {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_one_set_of_tensors(tmp_path: Path) -> None:
    weights = open_weights(two_shards(tmp_path))
    assert {key: tuple(found) for key, found in weights.tensors.items()} == {
        "a": ("F32", (3, 4)),
        "b": ("F32", (5,)),
    }
    target = torch.empty(2, 2)
    weights.read_into("a", Box((1, 1), (2, 2)), target)
    assert torch.equal(target, A[1:, 1:3])
    weights.close()


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"a": "model-1.safetensors", "b": "model-1.safetensors"},
            "model-1.safetensors: no 'b', which the index lists",
        ),
        (
            {"a": "model-1.safetensors", "c": "model-2.safetensors"},
            "model-2.safetensors: no 'c', which the index lists",
        ),
        ({"a": "model-1.safetensors"}, None),
    ],
)
def test_an_index_that_the_files_do_not_follow_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str | None
) -> None:
    two_shards(tmp_path, weight_map)
    if message is None:  # a file that the index does not name is ignored
        assert list(open_weights(tmp_path).tensors) == ["a"]
        return
    with pytest.raises(CheckpointError, match="and their index do not agree") as caught:
        open_weights(tmp_path)
    assert message in str(caught.value)


def test_a_tensor_that_is_there_twice_or_unannounced_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"b": B, "a": A + 1}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="do not agree") as caught:
        open_weights(tmp_path)
    assert "'a', which another file has too" in str(caught.value)
    save_file({"b": B, "z": A}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="do not agree") as caught:
        open_weights(tmp_path)
    assert "'z', which the index does not list" in str(caught.value)


@pytest.mark.parametrize(
    "file",
    ["../model-1.safetensors", "/etc/passwd", "x/../../a.safetensors", "..safetensors", 7, "a.bin"],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    save_file({"a": A}, tmp_path / "model-1.safetensors")
    two_shards(folder, {"a": file, "b": "model-2.safetensors"})
    with pytest.raises(CheckpointError, match="damaged or was made up"):
        open_weights(folder)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks files that its index names") as caught:
        open_weights(tmp_path)
    assert "no model-2.safetensors" in str(caught.value)


def test_a_name_that_stands_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    text = '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged or was made up"):
        open_weights(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights in it"):
        open_weights(tmp_path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match="header that cannot be right"):
        open_weights(tmp_path)


def test_the_older_files_are_read_without_running_anything_in_them(tmp_path: Path) -> None:
    torch.save({"a": A, "b": B}, tmp_path / "pytorch_model.bin")
    weights = open_weights(tmp_path)
    target = torch.empty(1, 3)
    weights.read_into("a", Box((2, 1), (1, 3)), target)
    assert torch.equal(target, A[2:, 1:])
    weights.close()
    torch.save({"a": [1, 2]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="something else than tensors"):
        open_weights(tmp_path)


def test_the_older_shards_are_read_by_their_index(tmp_path: Path) -> None:
    torch.save({"a": A}, tmp_path / "pytorch_model-1.bin")
    torch.save({"b": B}, tmp_path / "pytorch_model-2.bin")
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert set(open_weights(tmp_path).tensors) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": weight_map | {"b": "../pytorch_model-2.bin"}}))
    with pytest.raises(CheckpointError, match="damaged or was made up"):
        open_weights(tmp_path)
