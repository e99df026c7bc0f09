"""An index on the disk: what was written is read, and nothing stale or damaged is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError, DataError, MachineError
from tools.retrieval.block_index import (
    LIST,
    BlockIndex,
    IndexKey,
    has_index,
    write_list,
    write_part,
)

KEY = IndexKey(checkpoint="c", evidence="e")


def write(folder: Path) -> list[torch.Tensor]:
    """An index of two files, one of which has no blocks, and one more."""
    sizes = (3, 0, 2)
    vectors = [torch.arange(4.0 * size).view(size, 4) for size in sizes]
    ids = [torch.arange(size) + 10 * rank for rank, size in enumerate(sizes)]
    parts = [write_part(folder, rank, 3, ids[rank], values) for rank, values in enumerate(vectors)]
    assert not has_index(folder, KEY), "the list is written last"
    write_list(folder, KEY, parts)
    return vectors


def test_an_index_holds_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    vectors = write(folder)
    assert has_index(folder, KEY)
    index = BlockIndex(folder, KEY)
    assert len(index) == 5
    assert index.ids.tolist() == [0, 1, 2, 20, 21]
    for found, expected in zip(index.vectors(), (vectors[0], vectors[2]), strict=True):
        assert torch.equal(found, expected)
    assert not [path for path in folder.iterdir() if path.suffix not in (".safetensors", ".json")]


def test_an_index_of_another_checkpoint_or_other_blocks_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for key in (IndexKey("other", "e"), IndexKey("c", "other")):
        with pytest.raises(DataError, match="of another checkpoint or of other blocks"):
            BlockIndex(tmp_path, key)
        with pytest.raises(DataError, match="of another checkpoint or of other blocks"):
            has_index(tmp_path, key)


def test_a_folder_without_a_list_is_no_index(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no index of blocks"):
        BlockIndex(tmp_path, KEY)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    write(tmp_path)
    part = tmp_path / "part-00002-of-00003.safetensors"
    data = bytearray(part.read_bytes())
    if damage == "gone":
        part.unlink()
        with pytest.raises(DataError, match="of an index of blocks cannot be read"):
            BlockIndex(tmp_path, KEY)
        return
    data[-1] ^= 1
    part.write_bytes(data if damage == "flipped" else data[:-4])
    with pytest.raises(DataError, match="a file of an index of blocks is damaged"):
        BlockIndex(tmp_path, KEY)


@pytest.mark.parametrize(
    "change", [{"version": 9}, {"key": {"checkpoint": "c"}}, {"parts": [{"name": "x"}]}, None]
)
def test_a_damaged_list_is_refused(tmp_path: Path, change: dict[str, Any] | None) -> None:
    write(tmp_path)
    path = tmp_path / LIST
    text = path.read_text()
    path.write_text(text[:-9] if change is None else json.dumps(json.loads(text) | change))
    with pytest.raises(DataError, match="the list of an index of blocks is damaged"):
        BlockIndex(tmp_path, KEY)


def test_a_part_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"):
        write_part(tmp_path / "file", 0, 1, torch.zeros(0).long(), torch.zeros(0, 4))
