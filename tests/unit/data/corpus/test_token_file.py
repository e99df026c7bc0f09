"""Tokens are read as they lie, and a block that changed is named by its bytes."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.checksums import BlockHasher, IndexHasher
from megatron.data.corpus.token_file import TokenFile
from megatron.errors import DataError

BLOCK = 64
U16 = np.dtype("<u2")


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.corpus.checksums.BLOCK_BYTES", BLOCK)
    path = tmp_path / "c.bin"
    path.write_bytes(np.arange(10 * BLOCK // 2 + 5, dtype=U16).tobytes())
    return path


def checksums_of(path: Path):
    hasher = BlockHasher()
    hasher.update(path.read_bytes())
    return hasher.finish(IndexHasher())


@pytest.mark.parametrize("mapped", [False, True])
def test_tokens_are_those_at_the_byte(path, mapped):
    file = TokenFile(str(path), mapped=mapped)
    assert file.read(6, 4, U16).tolist() == [3, 4, 5, 6]
    assert file.read(6, 0, U16).tolist() == []
    assert file.stamp.size_bytes == 10 * BLOCK + 10


def test_only_blocks_that_were_asked_for_are_compared(path):
    file = TokenFile(str(path))
    assert not file.is_verified(0, 1), "nothing to compare with"
    file.verify(0, 1)
    file.expect(checksums_of(path))
    file.verify(BLOCK, BLOCK + 1)
    file.verify(5 * BLOCK - 1, 6 * BLOCK + 1)
    seen = [file.is_verified(at * BLOCK, at * BLOCK + 1) for at in range(11)]
    assert [at for at, is_seen in enumerate(seen) if is_seen] == [1, 4, 5, 6]
    assert file.is_verified(4 * BLOCK, 7 * BLOCK)
    assert not file.is_verified(4 * BLOCK, 7 * BLOCK + 1)
    assert file.is_verified(3, 3), "no bytes are always right"


def test_damage_is_named_by_file_bytes_and_both_checksums(path):
    checksums = checksums_of(path)
    content = bytearray(path.read_bytes())
    content[3 * BLOCK + 7] ^= 4
    path.write_bytes(content)
    file = TokenFile(str(path))
    file.expect(checksums)
    file.verify(0, 3 * BLOCK)
    with pytest.raises(DataError, match="not those that were written") as raised:
        file.verify(3 * BLOCK, 3 * BLOCK + 2)
    expected = f"{int(checksums.blocks[3]):016x}"
    found = f"{int(checksums_of(path).blocks[3]):016x}"
    assert f"{path}\n  found: bytes [192, 256) have xxh3_64 {found}, expected {expected}" in str(
        raised.value
    )


def test_all_damaged_blocks_are_named_at_once_and_many_are_counted(path):
    checksums = checksums_of(path)
    content = bytearray(path.read_bytes())
    for block in (0, 10):
        content[block * BLOCK] ^= 1
    path.write_bytes(content)
    file = TokenFile(str(path))
    file.verify_all()  # with nothing to compare
    file.expect(checksums)
    with pytest.raises(DataError) as raised:
        file.verify_all()
    assert "bytes [0, 64)" in str(raised.value)
    assert "bytes [640, 650)" in str(raised.value)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(DataError, match="and 3 more blocks"):
        file.verify_all()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot open"):
        TokenFile(str(tmp_path / "none.bin"))
