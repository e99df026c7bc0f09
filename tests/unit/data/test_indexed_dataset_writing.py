"""A corpus is written whole or not at all, and nothing that it cannot hold gets in."""

import errno
import gc
import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.corpus import checksums
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
    make_builder,
)
from megatron.errors import DataError, MachineError
from tests.support.examples import examples
from tests.unit.data.corpora import (
    METADATA,
    open_corpus,
    write_corpus,
    write_documents,
)


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "c")


@examples(25)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=6), max_size=4), min_size=1
    ).filter(lambda documents: any(item for items in documents for item in items))
)
def test_any_documents_of_any_items_are_read_back(tmp_path_factory, documents):
    prefix = str(tmp_path_factory.mktemp("any") / "c")
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for items in documents:
            flat = [token for item in items for token in item]
            builder.add_document(flat, [len(item) for item in items])
    corpus = MMapIndexedDataset(prefix)
    borders = corpus.doc_idx.tolist()
    read = [[item.tolist() for item in corpus[a:b]] for a, b in itertools.pairwise(borders)]
    assert read == documents


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_every_integer_type_keeps_its_extremes(tmp_path, dtype):
    limits = np.iinfo(dtype)
    with MMapIndexedDatasetBuilder(tmp_path / "c", dtype) as builder:
        builder.add_document([limits.min, limits.max])
    corpus = MMapIndexedDataset(tmp_path / "c")
    assert corpus[0].tolist() == [limits.min, limits.max]
    assert corpus.dtype == dtype


@pytest.mark.parametrize("ids", [[65536], [3, -1], np.array([2**40])])
def test_an_id_that_would_wrap_is_refused(tmp_path, ids):
    with (
        pytest.raises(DataError, match="does not fit the type") as raised,
        MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder,
    ):
        builder.add_item(ids)
    assert "uint16 holds 0..65535" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[1.5], [[1, 2]], ["a"], [True], [2**70]])
def test_what_is_no_flat_list_of_integers_is_refused(tmp_path, tokens):
    with (
        pytest.raises(DataError, match="a flat sequence of integers"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_item(tokens)


def test_an_item_too_long_for_its_size_field_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.indexed_dataset._LARGEST_ITEM", 3)
    with (
        pytest.raises(DataError, match="longer than the format can store"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_item([1, 2, 3, 4])


@pytest.mark.parametrize("lengths", [[1, 1], [4, -1], []])
def test_lengths_that_do_not_add_up_are_refused(tmp_path, lengths):
    with (
        pytest.raises(DataError, match="do not add up"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_document([1, 2, 3], lengths)


def test_a_corpus_with_an_open_document_is_refused(tmp_path):
    with (
        pytest.raises(DataError, match=r"last document of .* was never closed"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_item([1])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_corpus_is_refused(tmp_path):
    with (
        pytest.raises(DataError, match="would hold nothing"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_document([])
    assert list(tmp_path.iterdir()) == []


def test_a_finished_builder_stays_finished(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "c")
    builder.add_document([1])
    builder.finalize()
    with pytest.raises(DataError, match="already finished or given up"):
        builder.finalize()


def test_an_error_in_the_block_leaves_the_old_corpus_and_nothing_else(prefix, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.raises(DataError, match="does not fit the type"),
        MMapIndexedDatasetBuilder(prefix, np.uint16) as builder,
    ):
        builder.add_document([1, 2, 65536], [2, 1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_builder_that_is_dropped_removes_its_temporary_file(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "c")
    assert len(list(tmp_path.iterdir())) == 1
    del builder
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_remove_its_parents_file(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "c")
    child = os.fork()
    if child == 0:
        del builder
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    builder.add_document([1])
    builder.finalize()
    assert len(MMapIndexedDataset(tmp_path / "c")) == 1


def test_a_full_disk_is_a_machine_error_and_leaves_nothing(tmp_path):
    class FullDisk:
        def write(self, _data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    builder = MMapIndexedDatasetBuilder(tmp_path / "c")
    builder._file.close()
    builder._file = FullDisk()
    with pytest.raises(MachineError, match="cannot write"):
        builder.add_item([1])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_at_the_end_is_a_machine_error_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(MachineError, match="cannot write"),
        MMapIndexedDatasetBuilder(tmp_path / "c") as builder,
    ):
        builder.add_document([1])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named_before_any_work(tmp_path):
    with pytest.raises(DataError, match="mkdir -p"):
        MMapIndexedDatasetBuilder(tmp_path / "no" / "c")
    with pytest.raises(DataError, match="named by its prefix"):
        MMapIndexedDatasetBuilder(tmp_path / "c.bin")
    with pytest.raises(DataError, match="no code for this token type"):
        MMapIndexedDatasetBuilder(tmp_path / "c", np.float32)


def test_a_name_that_cannot_be_written_is_a_machine_error(tmp_path):
    with pytest.raises(MachineError, match="cannot write"):
        MMapIndexedDatasetBuilder(tmp_path / ("x" * 255))


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(None, np.int32), (100, np.uint16), (65499, np.uint16), (65500, np.int32), (65536, np.int32)],
)
def test_the_type_for_a_vocabulary_changes_at_65500(tmp_path, vocab_size, dtype):
    assert best_fitting_dtype(vocab_size) is dtype
    assert make_builder(str(tmp_path / "c"), vocab_size=vocab_size).dtype == dtype


def test_the_sidecar_gets_its_counts_from_the_builder(tmp_path):
    with MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16, metadata=METADATA) as builder:
        builder.add_document([1, 2, 3], [2, 1])
        builder.add_document([4])
    metadata = MMapIndexedDataset(tmp_path / "c").metadata
    assert metadata is not None
    assert (metadata.num_items, metadata.num_documents, metadata.num_tokens) == (3, 2, 4)
    assert (metadata.tokenizer_type, metadata.eod) == ("GPT2BPETokenizer", 4999)
    recorded = checksums.read_checksums(str(tmp_path / "c"))
    assert recorded is not None
    assert metadata.pair_id == recorded.pair_id


def test_a_corpus_written_over_another_does_not_keep_its_sidecar(tmp_path):
    write_corpus(tmp_path / "c", [4], metadata=METADATA)
    assert open_corpus(tmp_path, [4]).metadata is None
    assert MMapIndexedDataset(write_corpus(tmp_path / "c", [4])).metadata is None
