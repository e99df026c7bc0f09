"""An index is read as written, and every way of damaging it has its own message."""

import io
import struct

import numpy as np
import pytest

from megatron.data.corpus import index_file
from megatron.data.corpus.index_file import HEADER, index_code_of, read_index, write_index
from megatron.errors import DataError
from tests.unit.data.corpora import write_corpus

SIZES = [3, 0, 5]


@pytest.fixture
def path(tmp_path):
    return tmp_path / (write_corpus(tmp_path / "c", SIZES).rsplit("/", 1)[1] + ".idx")


def test_the_layout_is_megatrons_byte_for_byte(path):
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", *SIZES) + struct.pack("<3q", 0, 6, 6)
    expected += struct.pack("<4q", 0, 1, 2, 3)
    assert path.read_bytes() == expected
    assert len(expected) == 34 + 12 * 3 + 8 * 4


@pytest.mark.parametrize("most_bytes_read", [0, 10**6])
def test_a_mapped_index_says_what_a_read_one_does(path, monkeypatch, most_bytes_read):
    monkeypatch.setattr(index_file, "_MOST_INDEX_BYTES_READ", most_bytes_read)
    index = read_index(str(path))
    assert index.dtype == np.uint16
    assert index.sizes.tolist() == SIZES
    assert index.pointers.tolist() == [0, 6, 6]
    assert index.doc_idx.tolist() == [0, 1, 2, 3]
    assert (index.sizes.dtype, index.doc_idx.dtype) == (np.int32, np.int64)
    assert not any(array.flags.writeable for array in index[1:4])


@pytest.mark.parametrize(
    ("offset", "kind", "value", "message"),
    [
        (0, "<9s", b"PK\x03\x04     ", "not an index of a corpus"),
        (9, "<Q", 2, "an index of another version"),
        (17, "<B", 0, "expected one of the integer codes"),
        (17, "<B", 6, "code 6 (a floating-point type"),
        (17, "<B", 7, "code 7 (a floating-point type"),
        (18, "<Q", 0, "the corpus holds nothing"),
        (18, "<Q", 4, "another length than its header says"),
        (18, "<Q", 2**63, "another length than its header says"),
        (26, "<Q", 3, "another length than its header says"),
        (34, "<i", -1, "-1 for item 0"),
        (38, "<i", 4, "item 2 at byte 14"),
        (46, "<q", 2, "byte 2; expected item 0 at byte 0"),
        (54, "<q", 8, "does not start where the one before it ends"),
        (70, "<q", 1, "the documents do not cover the items"),
        (94, "<q", 2, "from 0 to 2; expected borders from 0 to 3"),
        (78, "<q", 3, "a document ends before it starts"),
    ],
)
def test_each_damaged_number_is_found_and_named(path, offset, kind, value, message):
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, offset, value)
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_index(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (33, "the index is shorter than its header"),
        (101, "expected 102 bytes (3 items, 4 document borders)"),
        (103, "found: 103 bytes"),
    ],
)
def test_an_index_of_another_length_is_refused(path, length, message):
    path.write_bytes((path.read_bytes() + b"\0")[:length])
    with pytest.raises(DataError) as raised:
        read_index(str(path))
    assert message in str(raised.value)


def test_an_index_cut_at_any_byte_is_refused(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError) as raised:
            read_index(str(path))
        assert str(path) in str(raised.value)
        assert f"{min(length, len(content))} bytes" in str(raised.value)


@pytest.mark.parametrize("most_bytes_read", [0, 10**6])
def test_the_modes_of_newer_files_are_read_and_absent_elsewhere(path, monkeypatch, most_bytes_read):
    monkeypatch.setattr(index_file, "_MOST_INDEX_BYTES_READ", most_bytes_read)
    assert read_index(str(path)).modes is None
    with path.open("ab") as file:
        file.write(np.array([0, -1, 1], np.int8).tobytes())
    index = read_index(str(path))
    assert index.modes is not None
    assert index.modes.tolist() == [0, -1, 1]
    assert not index.modes.flags.writeable
    assert index.doc_idx.tolist() == [0, 1, 2, 3]


def test_an_index_without_document_borders_is_refused(path):
    content = bytearray(path.read_bytes()[:-32])
    struct.pack_into("<Q", content, 26, 0)
    path.write_bytes(content)
    with pytest.raises(DataError, match="no borders"):
        read_index(str(path))


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot open"):
        read_index(str(tmp_path / "none.idx"))


def test_a_type_without_a_code_is_refused():
    with pytest.raises(DataError, match="no code for this token type"):
        index_code_of(np.dtype(np.uint64))


def test_offsets_do_not_overflow_32_bits():
    sizes = np.full(3, 2**31 - 1, np.int32)
    assert index_file.item_starts(sizes, np.dtype("<i4"))[-1] == 2 * 4 * (2**31 - 1)
    file = io.BytesIO()
    write_index(file, np.dtype("<i4"), sizes, np.array([0, 3]))
    assert len(file.getvalue()) == HEADER.size + 36 + 16
