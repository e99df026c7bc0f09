"""A merge is its parts end to end, each verified on the way."""

import errno
import os

import numpy as np
import pytest

from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
)
from megatron.errors import DataError, MachineError
from tests.unit.data.corpora import (
    flip,
    write_documents,
)


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "c")


def test_a_merge_is_the_items_and_documents_one_after_the_other(tmp_path):
    parts = [[[[1, 2], [3]], [[4]]], [[[5]]], [[[6, 7]], [[8], [9]]]]

    def build(name, documents):
        with MMapIndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for items in documents:
                builder.add_document([t for item in items for t in item], [*map(len, items)])
        return str(tmp_path / name)

    prefixes = [build(f"part{i}", part) for i, part in enumerate(parts)]
    build("whole", [document for part in parts for document in part])
    with MMapIndexedDatasetBuilder(tmp_path / "merged", np.uint16) as builder:
        for prefix in prefixes:
            builder.merge_file_(prefix)
    for suffix in (".idx", ".bin"):
        whole = (tmp_path / "whole").with_suffix(suffix).read_bytes()
        assert (tmp_path / "merged").with_suffix(suffix).read_bytes() == whole


def test_a_merge_of_another_type_is_refused(prefix, tmp_path):
    with (
        pytest.raises(DataError, match="different token types"),
        MMapIndexedDatasetBuilder(tmp_path / "m", np.int32) as builder,
    ):
        builder.merge_file_(prefix)


def test_a_merge_into_an_open_document_is_refused(prefix, tmp_path):
    with (
        pytest.raises(DataError, match="never closed"),
        MMapIndexedDatasetBuilder(tmp_path / "m", np.uint16) as builder,
    ):
        (builder.add_item([1]), builder.merge_file_(prefix))


def test_a_merge_of_the_output_into_itself_is_refused(prefix):
    with (
        pytest.raises(DataError, match="may not read the corpus that it writes"),
        MMapIndexedDatasetBuilder(prefix, np.uint16) as builder,
    ):
        builder.merge_file_(prefix)


def test_a_corpus_that_shrinks_during_a_merge_is_noticed(prefix, tmp_path, monkeypatch):
    open_corpus = MMapIndexedDataset.__init__

    def open_and_shrink(self, *given, **options):
        open_corpus(self, *given, **options)
        os.truncate(data_file_path(prefix), 4)

    monkeypatch.setattr(MMapIndexedDataset, "__init__", open_and_shrink)
    with (
        pytest.raises(DataError, match="end of file at byte 4"),
        MMapIndexedDatasetBuilder(tmp_path / "m", np.uint16) as builder,
    ):
        builder.merge_file_(prefix)


def test_a_corpus_that_is_written_to_during_a_merge_is_noticed(prefix, tmp_path, monkeypatch):
    write = MMapIndexedDatasetBuilder._write

    def write_and_append(self, data):
        write(self, data)
        with open(data_file_path(prefix), "ab") as file:
            file.write(b"more")

    monkeypatch.setattr(MMapIndexedDatasetBuilder, "_write", write_and_append)
    with (
        pytest.raises(DataError, match="changed while it was in use"),
        MMapIndexedDatasetBuilder(tmp_path / "m", np.uint16) as builder,
    ):
        builder.merge_file_(prefix)


def test_a_damaged_corpus_is_not_merged(prefix, tmp_path):
    flip(data_file_path(prefix), 3)
    with (
        pytest.raises(DataError, match="not those that were written"),
        MMapIndexedDatasetBuilder(tmp_path / "m", np.uint16) as builder,
    ):
        builder.merge_file_(prefix)
    assert not (tmp_path / "m.bin").exists()


def test_a_merge_onto_a_full_disk_is_a_machine_error(prefix, tmp_path):
    class FullDisk:
        def write(self, _data):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    builder = MMapIndexedDatasetBuilder(tmp_path / "m", np.uint16)
    builder._file.close()
    builder._file = FullDisk()
    with pytest.raises(MachineError, match="cannot write"):
        builder.merge_file_(prefix)
