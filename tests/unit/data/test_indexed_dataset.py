"""What was built is read back, and what is not a corpus is refused when it is opened."""

import errno
import gc
import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.config.data import DataIntegrity
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    index_file_path,
)
from megatron.errors import DataError, MachineError
from tests.unit.data.corpora import (
    DOCUMENTS,
    METADATA,
    random_sizes,
    real_gpt2_corpora,
    write_corpus,
    write_documents,
)

# sha256 of the .bin and the .idx of the reference corpus, and of random_sizes(300).
REFERENCE_FILES = ("bd6cae4cbc03040e", "6c66639d39299e15")
SYNTHETIC_FILES = ("989b84fb1a0aa10e", "beaffb3e3bef5eeb")


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "c")


def test_items_are_read_by_any_integer_and_by_slices(prefix):
    corpus = MMapIndexedDataset(prefix)
    assert len(corpus) == 4
    assert [item.tolist() for item in corpus] == DOCUMENTS
    assert corpus[np.int64(3)].tolist() == [4, 5]
    assert [item.tolist() for item in corpus[1:3]] == DOCUMENTS[1:3]
    assert corpus[0].dtype == corpus.dtype == np.uint16
    assert corpus.num_tokens == 6
    assert corpus.sizes.tolist() == [3, 0, 1, 2]
    assert corpus.doc_idx.tolist() == [0, 1, 2, 3, 4]
    assert corpus.metadata is None
    assert "4 items, 6 tokens, uint16" in repr(corpus)


def test_a_part_of_an_item_is_read_within_its_bounds(prefix):
    corpus = MMapIndexedDataset(prefix)
    assert corpus.get(0, 1).tolist() == [2, 3]
    assert corpus.get(0, 1, 1).tolist() == [2]
    assert corpus.get(0, 3).tolist() == []
    assert corpus.get(1).tolist() == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ((4,), "item 4"),
        ((-1,), "item -1"),
        ((0, 2, 2), r"tokens \[2, 4\) of item 0"),
        ((0, -1, 1), r"tokens \[-1, 0\)"),
        ((0, 4), r"tokens \[4, 3\)"),
        ((0, 0, -1), r"tokens \[0, -1\)"),
    ],
)
def test_nothing_outside_an_item_is_read(prefix, request_, message):
    with pytest.raises(IndexError, match=message):
        MMapIndexedDataset(prefix).get(*request_)


def test_a_caller_may_change_what_it_got(prefix):
    corpus = MMapIndexedDataset(prefix)
    corpus[0][:] = 9
    assert corpus[0].tolist() == [1, 2, 3]


def test_a_suffix_a_missing_file_and_a_short_file_are_refused_when_opening(prefix):
    with pytest.raises(DataError, match="named by its prefix"):
        MMapIndexedDataset(prefix + ".idx")
    with pytest.raises(DataError, match="cannot be opened"):
        MMapIndexedDataset(prefix + "x")
    os.truncate(data_file_path(prefix), 11)
    with pytest.raises(DataError, match="found: 11 bytes; expected 12 bytes"):
        MMapIndexedDataset(prefix)


def test_the_index_of_another_corpus_is_refused(prefix, tmp_path):
    other = write_corpus(tmp_path / "other", [9, 9])
    os.replace(index_file_path(other), index_file_path(prefix))
    with pytest.raises(DataError, match="another length than its index says"):
        MMapIndexedDataset(prefix)


def test_a_sidecar_of_another_corpus_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "c", [1, 2], metadata=METADATA)
    other = write_corpus(tmp_path / "other", [3], metadata=METADATA)
    os.replace(other + ".meta.json", prefix + ".meta.json")
    with pytest.raises(DataError, match="the sidecar describes another corpus"):
        MMapIndexedDataset(prefix)


def test_a_file_cut_short_while_open_gives_an_error_that_names_the_byte(prefix):
    corpus = MMapIndexedDataset(prefix, integrity=DataIntegrity.HEADER)
    os.truncate(data_file_path(prefix), 9)
    assert corpus[0].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="changed while it was in use") as raised:
        corpus[3]
    assert "end of file at byte 9, where 3 more bytes were" in str(raised.value)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_cut_short_is_found_by_its_first_block(prefix, mapped):
    corpus = MMapIndexedDataset(prefix, mapped=mapped)
    os.truncate(data_file_path(prefix), 9)
    with pytest.raises(DataError, match="end of file at byte 9, where 3 more bytes were"):
        corpus[0]


@pytest.mark.parametrize("integrity", DataIntegrity)
def test_a_mapping_reads_what_pread_reads(tmp_path, integrity):
    prefix = write_corpus(tmp_path / "c", random_sizes(200))
    copied, mapped = (
        MMapIndexedDataset(prefix, integrity=integrity, mapped=mapped) for mapped in (False, True)
    )
    for number, (one, other) in enumerate(zip(copied, mapped)):
        assert one.tolist() == other.tolist()
        assert one.dtype == other.dtype
        assert one.flags.writeable
        assert not (other.size and other.flags.writeable)
        half = len(one) // 2
        assert copied.get(number, half).tolist() == mapped.get(number, half).tolist()
    assert b"".join(copied.pieces()) == b"".join(mapped.pieces())
    assert pickle.loads(pickle.dumps(mapped)).mapped


def test_a_failing_disk_is_a_machine_error(prefix, monkeypatch):
    corpus = MMapIndexedDataset(prefix)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(MachineError, match=r"cannot read .* at byte 0"):
        corpus[0]


def test_a_read_in_pieces_gives_the_whole_item(prefix, monkeypatch):
    corpus = MMapIndexedDataset(prefix)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1]], at))
    assert corpus[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("path", [index_file_path, data_file_path])
def test_a_file_that_is_touched_or_removed_is_noticed(prefix, path):
    corpus = MMapIndexedDataset(prefix)
    corpus.check_unchanged()
    os.utime(path(prefix), ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was in use"):
        corpus.check_unchanged()
    os.unlink(path(prefix))
    with pytest.raises(DataError, match="No such file"):
        corpus.check_unchanged()


def test_a_replaced_corpus_is_noticed_and_the_open_one_still_reads(prefix):
    corpus = MMapIndexedDataset(prefix)
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([7, 7])
    assert corpus[0].tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="changed while it was in use"):
        corpus.check_unchanged()


def test_a_dataset_travels_to_another_process_as_its_prefix(prefix):
    corpus = MMapIndexedDataset(prefix)
    sent = pickle.dumps(corpus)
    assert len(sent) < 500
    assert pickle.loads(sent)[2].tolist() == [65499]
    write_corpus(prefix, [1])
    with pytest.raises(DataError, match="another index than the process that sent"):
        pickle.loads(sent)


def test_the_fingerprint_follows_sizes_type_and_documents_only(tmp_path):
    def fingerprint(name, documents, dtype=np.uint16):
        with MMapIndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            for items in documents:
                for item in items:
                    builder.add_item(item)
                builder.end_document()
        return MMapIndexedDataset(tmp_path / name).fingerprint()

    base = fingerprint("a", [[[1, 2]], [[3]]])
    assert fingerprint("b", [[[1, 2]], [[3]]]) == base
    others = {
        fingerprint("c", [[[1, 2]], [[3]]], np.int32),
        fingerprint("d", [[[1, 2], [3]]]),
        fingerprint("e", [[[1]], [[2, 3]]]),
    }
    assert len(others | {base}) == 4


def test_descriptors_are_closed_with_their_datasets(prefix):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(20):
        MMapIndexedDataset(prefix)
    gc.collect()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


def test_a_corpus_read_and_written_again_has_the_same_bytes(tmp_path):
    synthetic = write_corpus(tmp_path / "synthetic", random_sizes(300))
    hashes = {synthetic: SYNTHETIC_FILES} | dict.fromkeys(real_gpt2_corpora(), REFERENCE_FILES)
    for prefix, expected in hashes.items():
        corpus = MMapIndexedDataset(prefix)
        with MMapIndexedDatasetBuilder(tmp_path / "copy", corpus.dtype) as builder:
            for item in corpus:
                builder.add_document(item)
        for path, short_hash in zip((data_file_path, index_file_path), expected):
            written = Path(path(str(tmp_path / "copy"))).read_bytes()
            assert written == Path(path(prefix)).read_bytes()
            assert hashlib.sha256(written).hexdigest()[:16] == short_hash
