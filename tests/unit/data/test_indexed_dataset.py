"""What is built is read back; what is damaged, changed or half-written is refused."""

import errno
import gc
import hashlib
import itertools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron import log
from megatron.config.data import DataIntegrity
from megatron.data import corpus_checksums
from megatron.data.corpus_paths import checksum_file_path
from megatron.data.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
    data_file_path,
    index_file_path,
    make_builder,
)
from megatron.errors import DataError, MachineError
from tests.unit.data.corpora import (
    METADATA,
    open_corpus,
    random_sizes,
    real_gpt2_corpora,
    write_corpus,
)

REFERENCE_FILES = ("bd6cae4cbc03040e", "6c66639d39299e15")  # sha256 of the reference corpus
DOCUMENTS = [[1, 2, 3], [], [65499], [4, 5]]


@pytest.fixture
def prefix(tmp_path):
    with MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder:
        for document in DOCUMENTS:
            builder.add_document(document)
    return str(tmp_path / "c")


# ---- reading


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
    for prefix in (synthetic, *real_gpt2_corpora()):
        corpus = MMapIndexedDataset(prefix)
        with MMapIndexedDatasetBuilder(tmp_path / "copy", corpus.dtype) as builder:
            for item in corpus:
                builder.add_document(item)
        for path in (data_file_path, index_file_path):
            written = Path(path(str(tmp_path / "copy"))).read_bytes()
            assert written == Path(path(prefix)).read_bytes()
            if prefix != synthetic:
                assert hashlib.sha256(written).hexdigest()[:16] in REFERENCE_FILES


# ---- writing


@settings(max_examples=25, deadline=None)
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
        pytest.raises(DataError, match="longer than the format can say"),
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


# ---- merging


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


# ---- integrity


def test_a_flipped_bit_anywhere_is_found_when_its_block_is_read(prefix, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_checksums, "BLOCK_BYTES", 64)
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
    monkeypatch.setattr(corpus_checksums, "BLOCK_BYTES", 64)
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
    monkeypatch.setattr(log._SPEAKER, "said", set())
    os.unlink(checksum_file_path(prefix))
    for integrity in DataIntegrity:
        corpus = MMapIndexedDataset(prefix, integrity=integrity)
        assert corpus[0].tolist() == [1, 2, 3]
        corpus.verify()
    said = capsys.readouterr().err
    assert said.count("has no checksums") == 1
    assert "files exchanged for others of the same lengths cannot be found" in said


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


def flip(path, at, bits=1):
    content = bytearray(Path(path).read_bytes())
    content[at] ^= bits
    Path(path).write_bytes(content)


# ---- types and sidecars


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
    checksums = corpus_checksums.read_checksums(str(tmp_path / "c"))
    assert checksums is not None
    assert metadata.pair_id == checksums.pair_id


def test_a_corpus_written_over_another_does_not_keep_its_sidecar(tmp_path):
    write_corpus(tmp_path / "c", [4], metadata=METADATA)
    assert open_corpus(tmp_path, [4]).metadata is None
    assert MMapIndexedDataset(write_corpus(tmp_path / "c", [4])).metadata is None
