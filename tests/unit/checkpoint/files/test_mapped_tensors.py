"""Tensors in files are read in place, leave memory again, and never end the process."""

import os
from pathlib import Path

import pytest
import torch

from megatron import host
from megatron.checkpoint.files import safetensors_header, safetensors_io
from megatron.checkpoint.files.mapped_tensors import (
    MappedFile,
    MappedTensors,
    TensorRange,
    read_rate,
)
from megatron.errors import CheckpointError

MIB = 2**20
# Page tables, and what the interpreter allocates meanwhile.
NOISE = 4 * MIB


def ranges_in(path: Path) -> dict[str, TensorRange]:
    entries = safetensors_header.read(path).entries
    return {
        name: TensorRange(path, e.start, e.stop, e.dtype, e.shape) for name, e in entries.items()
    }


def test_tensors_of_several_files_are_what_was_written(tmp_path: Path) -> None:
    values = {"a": torch.randn(7, 5), "b": torch.randn(3).bfloat16()}
    for name, tensor in values.items():
        safetensors_io.write(tmp_path / name, [(name, tensor)])
    ranges = [ranges_in(tmp_path / name)[name] for name in values]
    mapped = MappedTensors(ranges, {})
    for _ in range(2):
        mapped.bring()
        assert all(map(torch.equal, mapped.tensors, values.values()))
        mapped.drop()
    assert all(map(torch.equal, mapped.tensors, values.values())), "pages come back when used"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_every_tensor_begins_where_one_in_memory_would(tmp_path: Path, dtype: torch.dtype) -> None:
    values = [torch.arange(count).to(dtype) for count in (64, 4, 64, 0, 5)]
    path = tmp_path / "weights"
    safetensors_io.write(path, [(str(at), tensor) for at, tensor in enumerate(values)])
    ranges = list(ranges_in(path).values())
    assert [each.is_aligned for each in ranges[:3]] == [True, True, False]
    mapped = MappedTensors(ranges, {})
    for _ in range(2):
        mapped.bring()
        found = mapped.tensors
        assert all(map(torch.equal, found, values))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found if tensor.numel())
        mapped.drop()
    assert all(map(torch.equal, mapped.tensors, values)), "they come back when used"


def test_a_copy_of_a_file_that_is_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    safetensors_io.write(path, [("a", torch.ones(1)), ("x", torch.ones(MIB))])
    of = ranges_in(path)["x"]
    mapped = MappedFile(path)
    os.truncate(path, of.stop - 1)
    with pytest.raises(CheckpointError, match="changed or cannot be read") as caught:
        mapped.read(of)
    assert f"it ends before byte {of.stop}" in str(caught.value.found)


@pytest.mark.parametrize("before", [0, 1], ids=["pages of the file", "a copy"])
def test_dropped_pages_are_not_resident_and_brought_ones_are(tmp_path: Path, before: int) -> None:
    values = [("x", torch.ones(16 * MIB))]
    if before:  # so that the large one is not aligned
        values.insert(0, ("small", torch.ones(before)))
    safetensors_io.write(tmp_path / "large", values)
    mapped = MappedTensors([ranges_in(tmp_path / "large")["x"]], {})
    held = host.resident_bytes("VmRSS")
    mapped.bring()
    assert host.resident_bytes("VmRSS") - held >= 64 * MIB - NOISE
    mapped.drop()
    assert host.resident_bytes("VmRSS") - held <= NOISE


def test_a_file_that_was_changed_or_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    safetensors_io.write(path, [("x", torch.ones(MIB))])
    mapped = MappedTensors([ranges_in(path)["x"]], files := {})
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed or cannot be read") as caught:
        mapped.bring()
    assert str(path) in str(caught.value.found)
    with pytest.raises(CheckpointError, match="changed or cannot be read"):
        mapped.tensors  # noqa: B018  # brought before, and looked at again
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(CheckpointError, match="changed or cannot be read") as caught:
        mapped.bring()
    assert f"{size} bytes before, {size // 2} now" in str(caught.value.found)
    with pytest.raises(CheckpointError, match="changed or cannot be read") as caught:
        files[path].bring(size // 2, size)  # cut after the look at its length
    assert "Bad address" in str(caught.value.found)


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="changed or cannot be read"):
        MappedFile(tmp_path / "x")


def test_a_kernel_that_cannot_bring_pages_is_asked_to_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    safetensors_io.write(path, [("x", torch.arange(5.0))])
    monkeypatch.setattr("megatron.checkpoint.files.mapped_tensors._POPULATE_READ", 9999)
    mapped = MappedTensors([ranges_in(path)["x"]], {})
    mapped.bring()
    assert torch.equal(mapped.tensors[0], torch.arange(5.0))


def test_the_rate_of_a_disk_is_measured_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    rate = read_rate(tmp_path / "x")
    assert rate is not None
    assert rate > 0
    assert read_rate(tmp_path / "none") is None
