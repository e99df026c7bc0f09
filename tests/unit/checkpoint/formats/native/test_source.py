"""Our own format as a source, and any source written as ours: same bits, bounded memory."""

import os
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.formats.native.format import FORMAT
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.load import storage
from megatron.checkpoint.sharded import ShardedTensor
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.support.checkpoints.sources import MemorySource, assert_same


def test_what_is_written_reads_back_bit_for_bit_and_loads_as_ours(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True)
    directory = write_sharded(source, tmp_path / "save")
    assert directory == tmp_path / "save" / "iter_0000010"
    with ShardedSource(directory) as found:
        found.verify()
        assert_same(found, source)
        assert found.scalars == source.scalars
        assert found.progress["consumed_samples"] == 80
        assert found.config["model"]["num_layers"] == 2
    ctx = ParallelContext.single()
    targets = [
        ShardedTensor.of(name, torch.empty_like(value)) for name, value in source.values.items()
    ]
    storage.open_checkpoint(tmp_path / "save", ctx=ctx).read_into(targets)
    for target in targets:
        assert torch.equal(target.parts[0].view, source.values[target.name]), target.name


def test_files_are_cut_by_size_and_one_tensor_is_read_at_a_time(tmp_path: Path) -> None:
    source = MemorySource.of_gpt()
    directory = write_sharded(source, tmp_path, shard_bytes=1000)
    content, _ = manifest.load(directory)
    assert len(content.files) > 3
    assert source.largest_read == max(value.numel() for value in source.values.values())
    with ShardedSource(directory) as found:
        assert_same(found, source)
        part = found.read("model/embedding.word.weight", Box((2, 1), (3, 4)))
        assert torch.equal(part, source.values["model/embedding.word.weight"][2:5, 1:5])


def test_of_a_stack_of_experts_one_is_read_at_a_time(tmp_path: Path) -> None:
    flags = {"num_experts": 5, "ffn_hidden_size": 40, "add_bias_linear": False}
    source = MemorySource.of_gpt(**flags)
    directory = write_sharded(source, tmp_path)
    assert source.largest_read == 40 * 8
    content, _ = manifest.load(directory)
    pieces = content.tensors["model/layers.1.mlp.experts.fc1.weight"].pieces
    assert [piece.box for piece in pieces] == [Box((e, 0, 0), (1, 40, 8)) for e in range(5)]
    with ShardedSource(directory) as found:
        found.verify()
        assert_same(found, source)


def test_weights_alone_begin_at_iteration_0(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True)
    options = WriteOptions(optimizer=False, iteration=0)
    with FORMAT.open_source(write_sharded(source, tmp_path, options), SourceOptions()) as found:
        assert all(name.startswith("model/") for name in found.tensors)
        assert (found.scalars, found.progress["iteration"]) == ({}, 0)


def test_an_iteration_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    write_sharded(MemorySource.of_gpt(), tmp_path)
    before = (tmp_path / "iter_0000000" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="holds this iteration already"):
        write_sharded(MemorySource.of_gpt(seed=1), tmp_path)
    assert (tmp_path / "iter_0000000" / "manifest.json").read_bytes() == before


def test_a_source_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    source = MemorySource.of_gpt()
    del source.values["model/final_norm.bias"]
    missing = source.tensors  # has less than the config: still a valid checkpoint
    assert "model/final_norm.bias" not in missing

    class Failing(MemorySource):
        def read(self, name: str, box: Box) -> torch.Tensor:
            if "layers.1" in name:
                raise CheckpointError("damaged", found=name, fix="none")
            return super().read(name, box)

    with pytest.raises(CheckpointError, match="damaged"):
        write_sharded(Failing(source.values, source.config), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_another_dtype_than_described_is_refused(tmp_path: Path) -> None:
    class Lying(MemorySource):
        def read(self, name: str, box: Box) -> torch.Tensor:
            return super().read(name, box).double()

    source = MemorySource.of_gpt()
    with pytest.raises(
        CheckpointError, match="differs from what its checkpoint's manifest describes"
    ):
        write_sharded(Lying(source.values, source.config), tmp_path)


def test_damage_is_found_by_verify_and_by_opening(tmp_path: Path) -> None:
    directory = write_sharded(MemorySource.of_gpt(), tmp_path)
    (file,) = directory.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with ShardedSource(directory) as found, pytest.raises(CheckpointError, match="damaged"):
        found.verify()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        ShardedSource(directory)


def test_a_file_without_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    directory = write_sharded(MemorySource.of_gpt(), tmp_path)
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"layers.0.mlp.fc2.bias", b"layers.0.mlp.fc2.bios"))
    with (
        ShardedSource(directory) as found,
        pytest.raises(CheckpointError, match="does not hold what the manifest says"),
    ):
        found.read("model/layers.0.mlp.fc2.bias", Box((0,), (8,)))


def test_no_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.checkpoint.formats.native.source._ROOM_BYTES", 1 << 60)
    with pytest.raises(CheckpointError, match="no room"):
        write_sharded(MemorySource.of_gpt(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_a_checkpoint_has_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_sharded(MemorySource.of_gpt(), tmp_path / "save")
    finally:
        os.umask(before)
    for path in [tmp_path / "save", *(tmp_path / "save").rglob("*")]:
        full = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == full & ~mask, path
