"""What torch.save writes: digested and durable, or the error of the disk."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from megatron.checkpoint.files import durable, torch_file, unpickle
from megatron.checkpoint.files.durable import DurableFile
from tests.support.checkpoints.small_disk import small_disk


def test_what_is_saved_is_loaded_and_digested_as_it_lies_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    record = torch_file.save(path, {"values": torch.arange(1000), "text": "\u00e4"})
    content = path.read_bytes()
    assert record == (len(content), xxhash.xxh3_128_hexdigest(content))
    loaded = unpickle.load(path)
    assert torch.equal(loaded["values"], torch.arange(1000))
    assert loaded["text"] == "\u00e4"


def test_a_full_disk_is_said_as_the_disk_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stand_in() -> None:
        def full(file: Any, data: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(file._path))

        monkeypatch.setattr(durable.DurableFile, "write", full)

    with (
        small_disk(tmp_path / "disk", kib=256, otherwise=stand_in) as disk,
        pytest.raises(OSError, match="No space left on device") as raised,
    ):
        torch_file.save(disk / "file.pt", [torch.randn(1 << 18), torch.randn(8)])
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(disk / "file.pt")


def test_what_cannot_be_pickled_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        torch_file.save(tmp_path / "file.pt", lambda: None)


def test_a_stream_says_how_far_it_is_and_leaves_the_file_to_its_block(tmp_path: Path) -> None:
    with DurableFile(tmp_path / "file") as file, torch_file.stream_of(file) as stream:
        assert stream.write(b"12345") == 5
        assert stream.tell() == 5
        stream.flush()
        stream.close()
        assert stream.write(memoryview(b"67")) == 2
    assert (tmp_path / "file").read_bytes() == b"1234567"
