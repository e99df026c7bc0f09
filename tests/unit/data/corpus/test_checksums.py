"""Checksums are those of the bytes, however they came, and damaged ones are refused by name."""

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron import atomic
from megatron.data.corpus import checksums
from megatron.data.corpus.checksums import (
    BLOCK_BYTES,
    BlockHasher,
    IndexHasher,
    adopt,
    check_index,
    read_checksums,
)
from megatron.errors import DataError, MachineError
from tests.unit.data.corpora import random_sizes, write_corpus

HEADER_BYTES = 56


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path / "c", [3, 0, 5])


@given(st.lists(st.binary(max_size=200), max_size=12), st.sampled_from([1, 7, 64]))
def test_blocks_do_not_depend_on_the_pieces_that_bytes_come_in(pieces, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", block_bytes)
        hasher = BlockHasher()
        for piece in pieces:
            hasher.update(piece)
        written = hasher.finish(IndexHasher())
    whole = b"".join(pieces)
    blocks = [whole[at : at + block_bytes] for at in range(0, len(whole), block_bytes)]
    assert written.blocks.tolist() == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert written.data_bytes == len(whole)


def test_the_file_is_a_header_the_blocks_and_the_pair_id(prefix):
    content = Path(prefix + ".sums").read_bytes()
    checksums = read_checksums(prefix)
    assert checksums is not None
    assert len(content) == HEADER_BYTES + 8 + 16
    assert content[:8] == b"MVSUMS\0\0"
    assert np.frombuffer(content, "<u8", 4, 8).tolist() == [
        1, BLOCK_BYTES, 16, os.path.getsize(prefix + ".idx"),
    ]  # fmt: skip
    assert content[40:56] == xxhash.xxh3_128_digest(Path(prefix + ".idx").read_bytes())
    assert (
        content[56:64]
        == np.array(xxhash.xxh3_64_intdigest(Path(prefix + ".bin").read_bytes()), "<u8").tobytes()
    )
    assert content[64:].hex() == checksums.pair_id == xxhash.xxh3_128_hexdigest(content[:64])


def test_a_written_corpus_has_the_checksums_that_adopting_it_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 100)
    prefix = write_corpus(tmp_path / "c", random_sizes(100))
    path = Path(prefix + ".sums")
    written = path.read_bytes()
    path.unlink()
    adopted = adopt(prefix)
    assert path.read_bytes() == written
    assert len(adopted.blocks) > 20
    assert {p.name for p in tmp_path.iterdir()} == {"c.bin", "c.idx", "c.sums"}


def test_equal_corpora_have_one_pair_id_and_others_another(tmp_path):
    prefixes = [write_corpus(tmp_path / name, sizes) for name, sizes in zip("abc", ([4], [4], [5]))]
    a, b, c = (read_checksums(prefix) for prefix in prefixes)
    assert a.pair_id == b.pair_id != c.pair_id


def test_a_corpus_that_has_checksums_is_not_adopted(prefix):
    with pytest.raises(DataError, match="has checksums already"):
        adopt(prefix)


def test_what_cannot_be_read_or_written_is_named(prefix, monkeypatch):
    os.unlink(prefix + ".sums")
    bin_bytes = Path(prefix + ".bin").read_bytes()
    os.unlink(prefix + ".bin")
    with pytest.raises(DataError, match=r"cannot read .*c\.bin"):
        adopt(prefix)
    Path(prefix + ".bin").write_bytes(bin_bytes)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "publish_file", fail)
    with pytest.raises(MachineError, match=r"cannot write .*c\.sums"):
        adopt(prefix)
    assert {p.suffix for p in Path(prefix).parent.iterdir()} == {".bin", ".idx"}


def test_a_corpus_may_have_no_checksums(prefix):
    os.unlink(prefix + ".sums")
    assert read_checksums(prefix) is None
    os.mkdir(prefix + ".sums")
    with pytest.raises(DataError, match="Is a directory"):
        read_checksums(prefix)


def test_checksums_damaged_at_any_byte_or_cut_anywhere_are_refused(prefix):
    path = Path(prefix + ".sums")
    good = path.read_bytes()
    wrong = [good[:length] for length in range(len(good))]
    wrong += [bytes([*good[:at], good[at] ^ 1, *good[at + 1 :]]) for at in range(len(good))]
    for content in [*wrong, good + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(DataError, match="the checksums of a corpus cannot be used") as raised:
            read_checksums(prefix)
        assert str(path) in str(raised.value)


def test_a_table_of_another_length_than_its_header_says_is_refused(prefix):
    path = Path(prefix + ".sums")
    body = bytearray(path.read_bytes()[:-16])
    body[24] = 0
    body[27] = 16  # 256 MiB of tokens
    path.write_bytes(bytes(body) + xxhash.xxh3_128_digest(bytes(body)))
    with pytest.raises(DataError, match="1 blocks for 268435456 bytes of tokens"):
        read_checksums(prefix)


def test_an_index_of_the_same_length_with_one_other_bit_is_refused(prefix):
    checksums = read_checksums(prefix)
    check_index(prefix, checksums)
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not the one that the checksums") as raised:
        check_index(prefix, checksums)
    assert f"{len(content)} bytes, xxh3_128 " in str(raised.value)
