"""Whatever bit flips and wherever a file ends: an error that names a file, or the right tokens."""

import contextlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataIntegrity
from megatron.data.corpus import checksums
from megatron.data.corpus.index_file import HEADER
from megatron.data.corpus.paths import checksum_file_path, corpus_files
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    index_file_path,
)
from megatron.errors import DataError, MegatronError
from tests.support.examples import examples
from tests.unit.data.corpora import METADATA, random_sizes, write_corpus, write_documents

VERIFYING = (DataIntegrity.TOUCHED, DataIntegrity.FULL)
SUFFIXES = (".idx", ".bin", ".sums", ".meta.json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of several blocks with all four files, and what each of them holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", 64)
        sizes = random_sizes(20, seed=9, most=20)
        prefix = write_corpus(tmp_path_factory.mktemp("c") / "c", sizes, metadata=METADATA)
    contents = {suffix: Path(prefix + suffix).read_bytes() for suffix in SUFFIXES}
    tokens = np.concatenate(MMapIndexedDataset(prefix)[:])
    return prefix, contents, tokens


def all_joined(corpus):
    return corpus.join(np.arange(len(corpus)))


def joined_one_by_one(corpus):
    return np.concatenate([corpus.join(np.array([item])) for item in range(len(corpus))])


def every_item(corpus):
    return np.concatenate(corpus[:])


def every_half(corpus):
    parts = [
        corpus.get(item, start, count)
        for item, size in enumerate(corpus.sizes.tolist())
        for start, count in ((0, size // 2), (size // 2, size - size // 2))
    ]
    return np.concatenate(parts)


# Each is tried on a corpus of its own, so that none is saved by what another one verified.
WAYS_TO_READ = (all_joined, joined_one_by_one, every_item, every_half)


@examples(400)
@given(
    st.sampled_from(SUFFIXES),
    st.integers(0, 2**20),
    st.sampled_from(VERIFYING),
    st.booleans(),
)
def test_a_flipped_bit_in_any_file_never_gives_other_tokens(corpus, suffix, bit, integrity, mapped):
    prefix, contents, tokens = corpus
    damaged = bytearray(contents[suffix])
    at = bit % (8 * len(damaged))
    damaged[at // 8] ^= 1 << at % 8
    path = Path(prefix + suffix)
    path.write_bytes(damaged)
    try:
        for read in WAYS_TO_READ:
            if suffix != ".meta.json":
                with pytest.raises(MegatronError) as raised:
                    read(MMapIndexedDataset(prefix, integrity=integrity, mapped=mapped))
                assert prefix in str(raised.value), "the file is named"
                continue
            # Words of the sidecar that mean nothing to a reader of tokens may be any.
            with contextlib.suppress(DataError):
                found = MMapIndexedDataset(prefix, integrity=integrity, mapped=mapped)
                assert np.array_equal(read(found), tokens)
                assert found.doc_idx.tolist() == list(range(len(found) + 1))
    finally:
        path.write_bytes(contents[suffix])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_at_any_byte_is_refused(corpus, suffix):
    prefix, contents, _ = corpus
    path = Path(prefix + suffix)
    try:
        for length in range(len(contents[suffix])):
            path.write_bytes(contents[suffix][:length])
            if suffix == ".meta.json" and not contents[suffix][length:].strip():
                MMapIndexedDataset(prefix)  # only the newline at its end is missing
                continue
            for integrity in VERIFYING:
                with pytest.raises(DataError) as raised:
                    MMapIndexedDataset(prefix, integrity=integrity)
                assert str(path) in str(raised.value)
    finally:
        path.write_bytes(contents[suffix])


@pytest.mark.parametrize("integrity", VERIFYING)
def test_an_index_with_modes_cut_at_any_byte_is_refused_even_where_they_begin(tmp_path, integrity):
    prefix = write_documents(tmp_path / "c")
    path = Path(index_file_path(prefix))
    content = path.read_bytes() + np.array([0, 1, -1, 0], np.int8).tobytes()
    path.write_bytes(content)
    os.unlink(checksum_file_path(prefix))
    checksums.adopt(prefix)
    modes = MMapIndexedDataset(prefix, integrity=integrity).modes
    assert modes is not None
    assert modes.tolist() == [0, 1, -1, 0]
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError) as raised:
            MMapIndexedDataset(prefix, integrity=integrity)
        assert str(path) in str(raised.value)


def replace_by_equal_bytes(prefix):
    """Another file of the same name, length and content: what rsync leaves."""
    path = Path(data_file_path(prefix))
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)


def replace_keeping_its_times(prefix):
    path = Path(data_file_path(prefix))
    times = path.stat()
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[::-1])
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(new, path)


def append_an_item(prefix):
    with open(data_file_path(prefix), "ab") as file:
        file.write(b"\1\0")


def replace_the_index(prefix):
    path = Path(index_file_path(prefix))
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)


def write_the_corpus_anew(prefix):
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([9, 9, 9])


def remove_the_tokens(prefix):
    os.unlink(data_file_path(prefix))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        replace_by_equal_bytes,
        replace_keeping_its_times,
        append_an_item,
        replace_the_index,
        write_the_corpus_anew,
        remove_the_tokens,
    ],
)
def test_files_that_change_under_an_open_corpus_are_noticed_and_never_mixed(
    tmp_path, change, mapped
):
    """The open corpus still reads the file that it opened, and detects that there is another."""
    prefix = write_documents(tmp_path / "c")
    corpus = MMapIndexedDataset(prefix, mapped=mapped)
    before = corpus[:2]
    change(prefix)
    after = corpus[:]
    assert [item.tolist() for item in after[:2]] == [item.tolist() for item in before]
    assert [item.tolist() for item in after] == [[1, 2, 3], [], [65499], [4, 5]]
    with pytest.raises(DataError, match="the corpus changed while it was in use") as raised:
        corpus.check_unchanged()
    files = [str(path) for path in corpus_files(prefix)]
    assert any(path in str(raised.value) for path in files)


def test_an_index_that_claims_more_items_than_there_are_bytes_is_refused_without_room_for_them(
    tmp_path,
):
    """Numbers beyond 32 bits are added up as they are, before any array is made."""
    prefix = write_documents(tmp_path / "c")
    path = Path(index_file_path(prefix))
    for items, borders in ((2**31 + 7, 2), (2**33, 2**32 + 1), (2**60, 2)):
        header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, items, borders)
        assert len(header) == HEADER.size
        path.write_bytes(header + bytes(100))
        with pytest.raises(DataError, match="another length than its header says") as raised:
            MMapIndexedDataset(prefix)
        assert f"expected {34 + 12 * items + 8 * borders} bytes" in str(raised.value)
