"""The manifest beside another framework's files: what differs from it is named by its file."""

from pathlib import Path

import pytest

from megatron.checkpoint.folder import manifest, seal
from megatron.errors import CheckpointError
from tests.unit.checkpoint.save.test_sealed_save import NAME, completed


def test_a_folder_that_is_as_it_was_passes(tmp_path: Path) -> None:
    directory = completed(tmp_path, 7).directory
    content = seal.of(directory)  # type: ignore[arg-type]
    assert content is not None
    seal.check_digests(directory, content, share=0, of=1)  # type: ignore[arg-type]
    assert seal.of(tmp_path) is None, "of another program"


def test_a_file_that_is_not_as_it_was_is_named(tmp_path: Path) -> None:
    completed(tmp_path, 7)
    directory = tmp_path / "iter_0000007"
    content = seal.of(directory)
    assert content is not None
    data = (directory / NAME).read_bytes()
    (directory / NAME).write_bytes(data[:-1] + b"x")
    assert seal.of(directory) == content, "lengths are right"
    with pytest.raises(CheckpointError, match=f"{NAME}: expected xxh3"):
        seal.check_digests(directory, content, share=0, of=2)
    seal.check_digests(directory, content, share=1, of=2)  # the random states
    (directory / NAME).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{NAME}: expected {len(data)} bytes, found"):
        seal.of(directory)
    text = bytearray((directory / manifest.SEAL).read_bytes())
    text[100] ^= 1
    (directory / manifest.SEAL).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"megatron\.json: "):
        seal.of(directory)
