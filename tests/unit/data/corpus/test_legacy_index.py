"""Corpora of the older format give the items of their mmap twins, and damage is named."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.legacy_index import LEGACY_HEADER, LEGACY_MAGIC, read_any_index
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import DataError

DOCUMENTS = [[[1, 2, 3], [4]], [[]], [[70000], [5, 6]]]
ITEMS = [item for document in DOCUMENTS for item in document]


def write_legacy(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> str:
    """What Megatron's lazy writer leaves for int32 tokens: counts of tokens, not of bytes."""
    items = [item for document in documents for item in document]
    sizes = [len(item) for item in items]
    borders = np.cumsum([0, *map(len, documents)])
    header = struct.pack("<8sQQQQQQ", b"TNTIDX\0\0", 1, 4, 4, len(items), len(items), len(borders))
    arrays = (range(len(items) + 1), np.cumsum([0, *sizes]), sizes, borders)
    index = header + b"".join(np.array(array, "<i8").tobytes() for array in arrays)
    Path(f"{prefix}.idx").write_bytes(index)
    tokens = [token for item in items for token in item]
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, "<i4").tobytes())
    return str(prefix)


@pytest.fixture
def prefix(tmp_path):
    return write_legacy(tmp_path / "old", DOCUMENTS)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_legacy_corpus_is_read_like_its_mmap_twin(prefix, tmp_path, mapped):
    with MMapIndexedDatasetBuilder(tmp_path / "new", np.int32) as builder:
        for document in DOCUMENTS:
            builder.add_document([t for item in document for t in item], [*map(len, document)])
    old, new = (MMapIndexedDataset(p, mapped=mapped) for p in (prefix, tmp_path / "new"))
    assert [item.tolist() for item in old] == [item.tolist() for item in new] == ITEMS
    assert old.fingerprint() == new.fingerprint(), "one index cache serves both"
    assert old.sizes.dtype == new.sizes.dtype == np.int32
    assert old.doc_idx.tolist() == new.doc_idx.tolist() == [0, 2, 3, 5]
    assert old.get(0, 1, 2).tolist() == [2, 3]
    assert old.modes is None


def test_a_legacy_corpus_can_be_merged_into_the_new_format(prefix, tmp_path):
    with MMapIndexedDatasetBuilder(tmp_path / "new", np.int32) as builder:
        builder.merge_file_(prefix)
    assert [item.tolist() for item in MMapIndexedDataset(tmp_path / "new")] == ITEMS


def test_the_format_is_told_by_the_first_bytes(prefix):
    assert LEGACY_MAGIC == b"TNTIDX\0\0"
    assert read_any_index(prefix + ".idx").dtype == np.int32
    Path(prefix + ".idx").write_bytes(b"something else that is long enough to hold a header")
    with pytest.raises(DataError, match="not an index of a corpus"):
        read_any_index(prefix + ".idx")


AFTER = LEGACY_HEADER.size  # where the arrays begin; there are 5 items and 4 borders


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (8, 2, "an index of another version"),
        (16, 6, "code 6 (a floating-point type"),
        (16, 9, "expected one of the integer codes"),
        (24, 8, "contradicts itself about the width of a token"),
        (32, 0, "the corpus holds nothing"),
        (32, 6, "an item is not a flat sequence of tokens"),
        (40, 6, "an item is not a flat sequence of tokens"),
        (48, 5, "the index has another length than its header says"),
        (AFTER + 8, 2, "an item is not a flat sequence of tokens"),
        (AFTER + 48 + 8, 2, "does not start where the one before it ends"),
        (AFTER + 48 + 40, 8, "the last item does not end where the sizes say"),
        (AFTER + 96, -1, "an item has a size that no item can have"),
        (AFTER + 96, 2**31, "an item has a size that no item can have"),
        (AFTER + 136, 1, "the documents do not cover the items"),
    ],
)
def test_each_damaged_number_of_a_legacy_index_is_named(prefix, offset, value, message):
    path = Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    struct.pack_into("<q", content, offset, value)
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_any_index(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_legacy_index_cut_at_any_byte_is_refused(prefix):
    path = Path(prefix + ".idx")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError) as raised:
            read_any_index(str(path))
        assert str(path) in str(raised.value)
