"""Pairs become rows of both stacks: all that fit, once an epoch, in an order of the seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import log
from megatron.config.data import OnTooLong
from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.data.samples.text_pairs import PairRecipe, TextPairs, shuffled_epochs
from megatron.errors import DataError
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in

START, END, PAD = 90, 91, 92


def write_pairs(folder, pairs, *, eod=None):
    """Write pairs of lists of tokens; returns their prefix."""
    for side, part in enumerate(("inputs", "targets")):
        metadata = CorpusMetadata(tokenizer_type="NullTokenizer", vocab_size=100, eod=eod)
        with MMapIndexedDatasetBuilder(
            folder / f"p_{part}_document", np.uint16, metadata=metadata
        ) as builder:
            for pair in pairs:
                builder.add_document([*pair[side], *([] if eod is None else [eod])])
    return str(folder / "p")


def make(prefix, folder, *, num_samples=4, start=0, stop=None, **changes):
    pairs = MTFDataset(prefix)
    recipe = {
        "marks": DecoderMarks(START, END, PAD),
        "seq_length": 5,
        "decoder_seq_length": 4,
        "seed": 3,
    }
    return TextPairs(
        pairs,
        DocumentSlice(name="train", start=start, stop=len(pairs) if stop is None else stop),
        recipe=PairRecipe(**(recipe | changes)),
        num_samples=num_samples,
        cache=cache_in(folder),
    )


@pytest.mark.parametrize("eod", [None, END])
def test_a_pair_is_a_row_of_each_stack(tmp_path, eod):
    dataset = make(write_pairs(tmp_path, [([1, 2, 3], [4, 5])], eod=eod), tmp_path)
    found = {name: row.tolist() for name, row in dataset[0].items()}
    assert found == {
        "text_enc": [1, 2, 3, END, PAD],
        "padding_mask": [1, 1, 1, 1, 0],
        "text_dec": [START, 4, 5, PAD],
        "labels": [4, 5, END, -1],
        "loss_mask": [1, 1, 1, 0],
    }
    assert all(row.dtype == np.int64 for row in dataset[0].values())


@pytest.mark.parametrize("eod", [None, END])
def test_pairs_that_just_fit_are_kept_and_longer_ones_counted(tmp_path, monkeypatch, eod):
    warnings = []
    monkeypatch.setattr(log, "warning", warnings.append)
    pairs = [([1] * 4, [1] * 3), ([2] * 5, [2]), ([3], [3] * 4), ([4], [4])]
    dataset = make(write_pairs(tmp_path, pairs, eod=eod), tmp_path, num_samples=2)
    assert sorted(int(dataset[i]["text_enc"][0]) for i in range(len(dataset))) == [1, 4]
    (warning,) = warnings
    assert "left out: 2 of 4; the longest input has 6 tokens, the longest target 5" in warning


def test_longer_pairs_may_be_an_error(tmp_path):
    prefix = write_pairs(tmp_path, [([1], [1]), ([2] * 7, [2])])
    with pytest.raises(DataError, match="some pairs of the train split") as error:
        make(prefix, tmp_path, on_too_long=OnTooLong.ERROR)
    assert "--seq-length 8 --decoder-seq-length 2" in str(error.value)
    with pytest.raises(DataError, match="all pairs of the train split"):
        make(prefix, tmp_path, start=1)
    with pytest.raises(DataError, match=r"the train split of .* is empty"):
        make(prefix, tmp_path, start=1, stop=1)


@examples(20)
@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 100))
def test_every_epoch_has_every_pair_once(count, samples, seed):
    pairs = np.arange(10, 10 + count)
    order = shuffled_epochs(pairs, num_samples=samples, seed=seed)["pair_idx"]
    assert samples <= len(order) < samples + count
    for epoch in order.reshape(-1, count):
        assert sorted(epoch.tolist()) == pairs.tolist()


def test_the_order_is_that_of_the_seed_and_epochs_differ(tmp_path):
    prefix = write_pairs(tmp_path, [([number], [number]) for number in range(20)])

    def order(seed):
        dataset = make(prefix, tmp_path, num_samples=40, seed=seed)
        assert dataset.epochs(30) == 1.5
        return [int(dataset[i]["text_enc"][0]) for i in range(40)]

    assert order(3) == order(3) != order(4)
    assert order(3)[:20] != order(3)[20:]


def test_the_fingerprint_changes_with_the_rows_and_no_index_counts_from_the_end(tmp_path):
    prefix = write_pairs(tmp_path, [([1], [1])])
    prints = {
        make(prefix, tmp_path, **changes).fingerprint()
        for changes in ({}, {"seq_length": 6}, {"decoder_seq_length": 5}, {"seed": 4})
    }
    assert len(prints) == 4
    dataset = make(prefix, tmp_path)
    assert list(dataset.index_files) == ["pair_idx"]
    dataset.check_unchanged()
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[index]
