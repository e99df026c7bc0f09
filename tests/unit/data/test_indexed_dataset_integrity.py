"""Bytes that are not those that were written are found before they are used."""

import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megatron import log
from megatron.config.data import DataIntegrity
from megatron.data.corpus import checksums
from megatron.data.corpus.paths import checksum_file_path
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    index_file_path,
)
from megatron.errors import DataError
from tests.unit.data.corpora import (
    METADATA,
    flip,
    random_sizes,
    write_corpus,
    write_documents,
)


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "c")


def test_a_flipped_bit_anywhere_is_found_when_its_block_is_read(prefix, monkeypatch, tmp_path):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    prefix = write_corpus(tmp_path / "blocks", random_sizes(60, seed=3))
    path = Path(data_file_path(prefix))
    good = path.read_bytes()
    rng = np.random.RandomState(5)
    for bit in rng.randint(0, 8 * len(good), 40).tolist():
        flip(path, bit // 8, 1 << bit % 8)
        block = bit // 8 // 64
        corpus = MMapIndexedDataset(prefix)
        itemsize = corpus.dtype.itemsize
        ends = np.cumsum(corpus.sizes) * itemsize
        starts = ends - corpus.sizes * itemsize
        for item, (start, stop) in enumerate(zip(starts.tolist(), ends.tolist())):
            holds = start < stop and start // 64 <= block <= (stop - 1) // 64
            if not holds:
                corpus.get(item)
                continue
            with pytest.raises(DataError, match="the tokens are not those that were") as raised:
                corpus.get(item)
            stop = min(len(good), 64 * block + 64)
            assert f"{path}\n  found: bytes [{64 * block}, {stop}) have" in str(raised.value)
            with pytest.raises(DataError):
                corpus.get(item)  # and again: an error is not forgotten
        with pytest.raises(DataError, match=rf"bytes \[{64 * block}, "):
            MMapIndexedDataset(prefix, integrity=DataIntegrity.FULL)
        for blind in (DataIntegrity.OFF, DataIntegrity.HEADER):
            list(MMapIndexedDataset(prefix, integrity=blind))
        path.write_bytes(good)
    MMapIndexedDataset(prefix, integrity=DataIntegrity.FULL).verify()


def test_a_block_is_compared_once(prefix, monkeypatch, tmp_path):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 64)
    prefix = write_corpus(tmp_path / "blocks", [1000, 3, 0, 5])
    compared = []
    digest = xxhash.xxh3_64_intdigest
    monkeypatch.setattr(
        xxhash, "xxh3_64_intdigest", lambda data: compared.append(len(data)) or digest(data)
    )
    corpus = MMapIndexedDataset(prefix)
    corpus.get(0, 10, 5)
    corpus.get(0, 10, 5)
    assert len(compared) == 1, "five tokens of a long item are one block"
    list(corpus)
    assert len(compared) == -(-1008 * 2 // 64)
    list(corpus)
    assert len(compared) == -(-1008 * 2 // 64)


def test_what_a_forked_worker_compared_need_not_be_compared_again(prefix):
    corpus = MMapIndexedDataset(prefix)
    child = os.fork()
    if child == 0:
        corpus.get(0)
        os._exit(0)
    os.waitpid(child, 0)
    flip(data_file_path(prefix), 0)
    corpus.get(0)
    with pytest.raises(DataError, match="not those that were written"):
        MMapIndexedDataset(prefix).get(0)


def test_exchanged_files_of_equal_lengths_are_found(tmp_path):
    a = write_corpus(tmp_path / "a", [3, 5])
    b = write_corpus(tmp_path / "b", [5, 3])
    c = write_corpus(tmp_path / "c", [1, 7])
    os.replace(index_file_path(b), index_file_path(a))
    with pytest.raises(DataError, match="the index is not the one that the checksums") as raised:
        MMapIndexedDataset(a)
    assert index_file_path(a) in str(raised.value)
    MMapIndexedDataset(a, integrity=DataIntegrity.OFF)
    with MMapIndexedDatasetBuilder(tmp_path / "other", np.uint16) as builder:
        builder.add_document([9])
        builder.add_document([8] * 7)
    os.replace(data_file_path(str(tmp_path / "other")), data_file_path(c))
    with pytest.raises(DataError, match="the tokens are not those that were written"):
        MMapIndexedDataset(c)[0]


def test_a_sidecar_of_another_corpus_of_equal_counts_is_refused(tmp_path):
    a = write_corpus(tmp_path / "a", [3, 5], metadata=METADATA)
    b = write_corpus(tmp_path / "b", [5, 3], metadata=METADATA)
    os.replace(b + ".meta.json", a + ".meta.json")
    with pytest.raises(DataError, match="the checksums and the sidecar are of different corpora"):
        MMapIndexedDataset(a)


def test_a_corpus_without_checksums_is_read_after_one_warning(prefix, capsys, monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    os.unlink(checksum_file_path(prefix))
    for integrity in DataIntegrity:
        corpus = MMapIndexedDataset(prefix, integrity=integrity)
        assert corpus[0].tolist() == [1, 2, 3]
        corpus.verify()
    output = capsys.readouterr().err
    assert output.count("has no checksums") == 1
    assert "files exchanged for others of the same lengths cannot be found" in output


def test_a_corpus_that_grows_or_is_rewritten_while_open_is_noticed(prefix):
    for change in (append, rewrite):
        corpus = MMapIndexedDataset(prefix)
        corpus.check_unchanged()
        change(data_file_path(prefix))
        with pytest.raises(DataError, match="changed while it was in use") as raised:
            corpus.check_unchanged()
        assert data_file_path(prefix) in str(raised.value)
        os.truncate(data_file_path(prefix), 12)


def append(path):
    with open(path, "ab") as file:
        file.write(b"ab")


def rewrite(path):
    content = Path(path).read_bytes()
    Path(path).write_bytes(content)
    os.utime(path, ns=(10**9, 10**9))
