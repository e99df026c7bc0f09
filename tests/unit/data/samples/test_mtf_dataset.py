"""A pair is one input and one target, and two corpora that are no pair are refused."""

import dataclasses
import pickle

import numpy as np
import pytest

from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.errors import DataError
from tests.unit.data.corpora import METADATA, write_corpus


def write_pairs(folder, inputs, targets, **options):
    """A pair of corpora of these sizes; returns the prefix."""
    write_corpus(folder / "p_inputs_document", inputs, **options)
    write_corpus(folder / "p_targets_document", targets, **options)
    return str(folder / "p")


def test_items_are_the_documents_of_both_corpora(tmp_path):
    pairs = MTFDataset(write_pairs(tmp_path, [2, 3, 1], [1, 4, 2]))
    assert len(pairs) == 3
    assert pairs.lengths.tolist() == [3, 7, 3]
    assert pairs.lengths.dtype == np.int64
    assert {key: part.tolist() for key, part in pairs[1].items()} == {
        "input_tokens": [2, 3, 4],
        "target_tokens": [1, 2, 3, 4],
    }
    assert {part.dtype for part in pairs[1].values()} == {np.dtype(np.int64)}
    document = pairs.document(1)
    assert document.tokens.tolist() == [2, 3, 4, 1, 2, 3, 4]
    assert document.is_input.tolist() == [True] * 3 + [False] * 4
    for index in (-1, 3):
        with pytest.raises(IndexError):
            pairs[index]


def test_pairs_travel_to_a_worker(tmp_path):
    pairs = MTFDataset(write_pairs(tmp_path, [2, 3], [1, 4]))
    other = pickle.loads(pickle.dumps(pairs))
    assert other.fingerprint() == pairs.fingerprint()
    assert other[1]["target_tokens"].tolist() == [1, 2, 3, 4]


def test_the_fingerprint_changes_with_either_corpus(tmp_path):
    prints = set()
    for number, (inputs, targets) in enumerate(
        [([2, 3], [1, 4]), ([3, 2], [1, 4]), ([2, 3], [4, 1])]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        prints.add(MTFDataset(write_pairs(folder, inputs, targets)).fingerprint())
    assert len(prints) == 3


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_a_touched_corpus_of_the_two_is_found(part, tmp_path):
    pairs = MTFDataset(write_pairs(tmp_path, [2, 3], [1, 4]))
    pairs.check_unchanged()
    with open(tmp_path / f"p_{part}_document.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match="changed"):
        pairs.check_unchanged()


def test_different_numbers_of_documents_are_refused(tmp_path):
    with pytest.raises(DataError, match="inputs and targets are not aligned") as raised:
        MTFDataset(write_pairs(tmp_path, [2, 3], [1]))
    assert "2 in" in str(raised.value)
    assert "--json-keys inputs targets" in raised.value.fix


def test_a_missing_half_is_named(tmp_path):
    write_corpus(tmp_path / "p_inputs_document", [1])
    with pytest.raises(DataError, match="p_targets_document"):
        MTFDataset(str(tmp_path / "p"))


def test_documents_of_several_items_are_refused(tmp_path):
    prefix = write_pairs(tmp_path, [2, 3], [1, 4])
    with MMapIndexedDatasetBuilder(tmp_path / "p_targets_document", np.uint16) as builder:
        builder.add_document([1, 2, 3], [1, 2])
    with pytest.raises(DataError, match=r"a document of .* is not one item"):
        MTFDataset(prefix)


def test_different_tokenizers_are_refused(tmp_path):
    prefix = write_pairs(tmp_path, [2], [1], metadata=METADATA)
    MTFDataset(prefix)
    other = dataclasses.replace(METADATA, vocab_size=4000)
    write_corpus(tmp_path / "p_targets_document", [1], metadata=other)
    with pytest.raises(DataError, match="made with different tokenizers"):
        MTFDataset(prefix)
