"""Items read end to end: the compiled reader against its Python twin, and what it declines."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataIntegrity
from megatron.data.corpus import token_file
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import DataError
from tests.unit.data.corpora import flip, write_corpus

SIZES = (3, 0, 7, 1, 0, 12, 5)
DTYPES = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[MMapIndexedDataset]:
    """Every token type, read and mapped, with values at both ends of the type."""
    folder = tmp_path_factory.mktemp("join")
    opened = []
    for dtype in DTYPES:
        prefix = folder / np.dtype(dtype).name
        limits = np.iinfo(dtype)
        ends = np.array([limits.min, limits.max, 1, 0], dtype)
        with MMapIndexedDatasetBuilder(prefix, dtype) as builder:
            for size in SIZES:
                builder.add_document(np.resize(ends, size))
        for mapped in (False, True):
            for integrity in (DataIntegrity.OFF, DataIntegrity.TOUCHED):
                opened.append(MMapIndexedDataset(prefix, integrity=integrity, mapped=mapped))
                opened[-1].join(np.arange(len(SIZES)))  # verifies every item that is touched
    return opened


@given(data=st.data(), wide=st.booleans())
def test_the_compiled_reader_and_its_twin_give_the_same_tokens(corpora, data, wide):
    corpus = data.draw(st.sampled_from(corpora))
    items = data.draw(st.lists(st.integers(0, len(SIZES) - 1), max_size=6))
    first = SIZES[items[0]] if items else 0
    last = SIZES[items[-1]] if items else 0
    start = data.draw(st.integers(0, first))
    stop = data.draw(st.none() | st.integers(start if len(items) == 1 else 0, last))
    chosen = np.array(items, np.int64 if wide else np.int32)
    joined = corpus.join(chosen, start, stop)
    expected = corpus._join_with_python(chosen, start, stop)
    assert joined.dtype == expected.dtype == np.int64
    assert joined.tolist() == expected.tolist()
    again = corpus._reader.join(chosen, start, -1 if stop is None else stop)
    assert again is not None  # every item was verified, so nothing is left to Python
    assert again.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("items", "start", "stop"),
    [
        ([7], 0, None),
        ([-1], 0, None),
        ([0], 4, None),
        ([0], 0, 4),
        ([0], 2, 1),
        ([2, 0], 0, 4),
        ([0], -1, None),
    ],
)
@pytest.mark.parametrize("which", [0, 2])
def test_tokens_outside_of_an_item_are_refused_in_words(corpora, which, items, start, stop):
    corpus = corpora[which]
    with pytest.raises(IndexError, match=r"item -?\d of"):
        corpus.join(np.array(items, np.int32), start, stop)


def test_an_item_of_a_damaged_block_is_never_joined(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", SIZES)
    flip(f"{prefix}.bin", 4)
    for mapped in (False, True):
        corpus = MMapIndexedDataset(prefix, mapped=mapped)
        for _ in range(2):
            with pytest.raises(DataError, match="not those that were written"):
                corpus.join(np.array([0, 2], np.int32))


def test_a_file_that_is_cut_short_after_it_was_verified_is_named(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", SIZES)
    corpus = MMapIndexedDataset(prefix)
    items = np.array([5, 6], np.int32)
    before = corpus.join(items)
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(8)
    assert len(before) == 17
    with pytest.raises(DataError, match="end of file at byte"):
        corpus.join(items)


def test_verifying_everything_leaves_nothing_for_python_to_look_at(tmp_path):
    corpus = MMapIndexedDataset(write_corpus(tmp_path / "corpus", SIZES))
    items = np.array([2, 0], np.int32)
    assert corpus._reader.join(items, 0, -1) is None  # not yet
    corpus.verify()
    assert corpus._reader.join(items, 0, -1).tolist() == corpus.join(items).tolist()


def test_arrays_of_another_kind_than_an_index_are_not_taken_for_one(tmp_path):
    corpus = MMapIndexedDataset(write_corpus(tmp_path / "corpus", SIZES))
    make = token_file._built.TokenReader
    sizes, pointers = corpus.sizes, corpus._pointers
    with pytest.raises(ValueError, match="one per item"):
        make(corpus, 0, None, corpus.dtype, sizes[:-1], pointers, None, 1)
    with pytest.raises(ValueError, match="one byte or more"):
        make(corpus, 0, None, corpus.dtype, sizes, pointers, b"1", 0)
    with pytest.raises(TypeError, match="integers of 8 to 64 bits"):
        make(corpus, 0, None, np.dtype(np.float32), sizes, pointers, None, 1)
    few_marks = make(corpus, 0, None, corpus.dtype, sizes, pointers, b"1", 4)
    assert few_marks.join(np.array([5], np.int32), 0, -1) is None  # beyond them nothing is verified


@pytest.mark.parametrize("built", [None, SimpleNamespace(INTERFACE=0)])
def test_without_the_compiled_reader_the_twin_reads(tmp_path: Path, monkeypatch, built):
    prefix = write_corpus(tmp_path / "corpus", SIZES)
    items = np.array([2, 0, 5], np.int32)
    expected = MMapIndexedDataset(prefix).join(items, 1, 4)
    monkeypatch.setattr(token_file, "_built", built)
    corpus = MMapIndexedDataset(prefix)
    assert corpus._reader is None
    assert corpus.join(items, 1, 4).tolist() == expected.tolist()
