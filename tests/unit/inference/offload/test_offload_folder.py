"""A file of an offload folder is used only if it holds just what the checkpoint holds now."""

import dataclasses
import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.files import safetensors_header, safetensors_io
from megatron.checkpoint.files.durable import DurableFile
from megatron.checkpoint.files.mapped_tensors import MappedTensors
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.errors import CheckpointError
from megatron.inference.offload.offload_folder import (
    OffloadedTensor,
    OffloadFolder,
    content_digest,
)
from tests.unit.checkpoint.folder.test_manifest import example

VALUES = [torch.arange(7).bfloat16(), torch.randn(3, 5), torch.randn(32).bfloat16()]
TENSORS = [
    OffloadedTensor("narrow", "BF16", (7,)),
    OffloadedTensor("wide", "F32", (3, 5)),
    OffloadedTensor("a line", "BF16", (32,)),
]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(log, "warning", texts.append)
    monkeypatch.setattr(log, "info", texts.append)
    return texts


def values_of(ranges: Sequence[Any]) -> list[Tensor]:
    return MappedTensors(ranges, {}).tensors


def test_what_was_written_is_found_with_the_same_bits(tmp_path: Path, warned: list[str]) -> None:
    folder = OffloadFolder(tmp_path / "new", "content")
    assert not folder.is_recorded("layers.0", TENSORS)
    assert folder.find("layers.0", TENSORS) is None
    written = folder.write("layers.0", TENSORS, VALUES)
    again = OffloadFolder(tmp_path / "new", "content")
    assert again.is_recorded("layers.0", TENSORS)
    assert again.find("layers.0", TENSORS) == written
    assert all(map(torch.equal, values_of(written), VALUES))
    assert written[2].is_aligned
    assert len(list((tmp_path / "new").iterdir())) == 2, "a file and its record"
    assert warned == []


@pytest.mark.parametrize(
    ("content", "layer", "tensors"),
    [
        ("other content", "layers.0", TENSORS),
        ("content", "layers.1", TENSORS),
        ("content", "layers.0", [TENSORS[0]._replace(dtype_code="F16"), *TENSORS[1:]]),
        ("content", "layers.0", TENSORS[:2]),
        ("content", "layers.0", [TENSORS[0], TENSORS[1]._replace(shape=(5, 3)), TENSORS[2]]),
    ],
)
def test_files_of_something_else_are_not_found(
    tmp_path: Path, content: str, layer: str, tensors: list[OffloadedTensor], warned: list[str]
) -> None:
    written = OffloadFolder(tmp_path, "content").write("layers.0", TENSORS, VALUES)
    other = OffloadFolder(tmp_path, content)
    assert not other.is_recorded(layer, tensors)
    assert other.find(layer, tensors) is None
    assert warned == []
    other.note_others([])
    assert "1 files (0.00 GiB)" in warned[0]
    assert "they are not used, and can be removed" in warned[0]
    other.note_others([written[0].path])
    assert len(warned) == 1


def test_a_file_under_the_right_name_with_other_content_is_written_again(
    tmp_path: Path, warned: list[str]
) -> None:
    folder = OffloadFolder(tmp_path, "content")
    path = folder.write("layers.0", TENSORS, VALUES)[0].path
    other = {each.name: -values for each, values in zip(TENSORS, VALUES)}
    order = list(safetensors_header.read(path).entries)
    path.unlink()
    safetensors_io.write(path, [(name, other[name]) for name in order])
    assert folder.is_recorded("layers.0", TENSORS), "its length is right"
    assert folder.find("layers.0", TENSORS) is None
    assert "is damaged and is written again" in warned[0]
    folder.write("layers.0", TENSORS, VALUES)
    found = folder.find("layers.0", TENSORS)
    assert found is not None
    assert all(map(torch.equal, values_of(found), VALUES))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(1).randrange(len(data))] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": flip,
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "no record": lambda path: path.with_suffix(".json").unlink(),
    "cut record": lambda path: path.with_suffix(".json").write_text('{"bytes": 3'),
    "list as record": lambda path: path.with_suffix(".json").write_text("[1]"),
    "wrong types": lambda path: path.with_suffix(".json").write_text('{"bytes": true, "xxh3": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_never_used(tmp_path: Path, damage: str, warned: list[str]) -> None:
    folder = OffloadFolder(tmp_path, "content")
    path = folder.write("layers.0", TENSORS, VALUES)[0].path
    DAMAGES[damage](path)
    assert folder.find("layers.0", TENSORS) is None
    assert str(path) in warned[0]
    folder.write("layers.0", TENSORS, VALUES)
    assert folder.find("layers.0", TENSORS) is not None
    assert len(warned) == 1


def test_a_full_disk_is_named_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: DurableFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self._path))

    monkeypatch.setattr(DurableFile, "write", full)
    folder = OffloadFolder(tmp_path, "content")
    with pytest.raises(
        CheckpointError, match=r"writing layers\.0 into the offload folder"
    ) as caught:
        folder.write("layers.0", TENSORS, VALUES)
    assert "ENOSPC" in str(caught.value.found)
    assert "free space there" in caught.value.fix
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert folder.find("layers.0", TENSORS) is None
    assert folder.write("layers.0", TENSORS, VALUES)


def test_the_content_of_a_checkpoint_is_that_of_its_files(tmp_path: Path) -> None:
    recorded = example()
    other = dataclasses.replace(recorded, files={"x": FileRecord(1, "0" * 32)})
    assert content_digest(recorded, tmp_path) == content_digest(recorded, tmp_path / "elsewhere")
    assert content_digest(recorded, tmp_path) != content_digest(other, tmp_path)


def test_files_without_recorded_digests_are_read(tmp_path: Path) -> None:
    bare = dataclasses.replace(example(), files={})
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "x").write_bytes(b"12345")
    first = content_digest(bare, tmp_path)
    status = (tmp_path / "part" / "x").stat()
    (tmp_path / "part" / "x").write_bytes(b"12346")
    os.utime(tmp_path / "part" / "x", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_digest(bare, tmp_path) != first, "of equal length and time"
    (tmp_path / "part" / "x").write_bytes(b"12345")
    assert content_digest(bare, tmp_path) == first


def test_a_checkpoint_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    (tmp_path / "x").write_bytes(b"1")
    monkeypatch.setattr("megatron.inference.offload.offload_folder.store.digest_of", fail)
    bare = dataclasses.replace(example(), files={})
    with pytest.raises(CheckpointError, match="reading the checkpoint failed"):
        content_digest(bare, tmp_path)
