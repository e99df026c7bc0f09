"""Splits of a corpus of pairs share no pair, and rows hold the pairs whole."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import OnTooLong
from megatron.data.data_utils import (
    DocumentSlice,
    IndexPlace,
    build_train_valid_test_datasets,
    split_ranges,
)
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.dataset_makers import PackedRows
from megatron.data.loading.loaders import build_data_loader
from megatron.data.loading.packed_batch import packed_batch
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.data.samples.packed_mtf_dataset import PackedMTFDataset
from megatron.errors import ConfigError, DataError
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in

PAD = 0


def write_pairs(folder, sizes):
    """Pair d of `sizes` (input, target) holds the token d + 1 throughout; returns the prefix."""
    folder.mkdir(exist_ok=True)
    for side, part in enumerate(("inputs", "targets")):
        with MMapIndexedDatasetBuilder(folder / f"p_{part}_document", np.uint16) as builder:
            for number, pair in enumerate(sizes):
                builder.add_document([number + 1] * pair[side])
    return str(folder / "p")


def make(prefix, folder, **changes):
    pairs = MTFDataset(prefix)
    options = {
        "documents": DocumentSlice(name="train", start=0, stop=len(pairs)),
        "num_samples": 5,
        "seq_length": 15,
        "seed": 1234,
        "pad": PAD,
        "cache": cache_in(folder),
    }
    return PackedMTFDataset(pairs, **(options | changes))


def rows(seed):
    """Rows of 15 tokens, as the builder makes them of any prefix."""
    return PackedRows(
        kind=DatasetKind.MTF, open_corpus=MMapIndexedDataset, seq_length=15, seed=seed, pad=PAD
    )


@examples(15)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=8, max_size=30),
    st.integers(0, 1000),
)
def test_splits_share_no_pair_and_have_them_whole(tmp_path_factory, sizes, seed):
    folder = tmp_path_factory.mktemp("pairs")
    datasets = build_train_valid_test_datasets(
        rows(seed),
        data_path=(write_pairs(folder, sizes),),
        split="60,20,20",
        num_samples=(6, 3, 3),
        place=IndexPlace(),
    )
    borders = split_ranges("60,20,20", len(sizes))
    for dataset, start, stop in zip(datasets, borders, borders[1:], strict=False):
        assert dataset is not None
        for index in range(len(dataset)):
            sample = dataset[index]
            for segment in range(1, sample["segment_ids"].max() + 1):
                here = sample["segment_ids"] == segment
                (token,) = set(sample["text"][here].tolist())
                assert start <= token - 1 < stop
                inputs, targets = sizes[token - 1]
                assert sample["is_input"][here].tolist() == [1] * inputs + [0] * targets


def test_a_split_without_samples_is_not_built(tmp_path):
    options = {"data_path": (write_pairs(tmp_path, [(2, 3)] * 10),), "split": "800,200,0.1"}
    options["place"] = IndexPlace()
    train, valid, test = build_train_valid_test_datasets(rows(1), num_samples=(4, 0, 0), **options)
    assert isinstance(train, PackedMTFDataset)
    assert (valid, test) == (None, None)
    with pytest.raises(DataError, match=r"the test split of .* is empty"):
        build_train_valid_test_datasets(rows(1), num_samples=(4, 0, 1), **options)


def test_another_sequence_length_is_never_served_from_the_cache(tmp_path):
    prefix = write_pairs(tmp_path, [(2, 3)] * 10)
    for seq_length in (15, 7, 15):
        dataset = make(prefix, tmp_path, seq_length=seq_length)
        assert dataset[0]["text"].shape == (seq_length + 1,)
        assert dataset[0]["segment_ids"].max() == (seq_length + 1) // 5


def test_a_pair_may_not_be_cut(tmp_path):
    with pytest.raises(ConfigError, match="a pair that is cut loses its target"):
        make(write_pairs(tmp_path, [(2, 3)]), tmp_path, on_too_long=OnTooLong.CUT)


def test_pairs_that_are_all_too_long_are_an_error_at_once(tmp_path):
    with pytest.raises(DataError, match="every document of the train split"):
        make(write_pairs(tmp_path, [(12, 5), (10, 9)]), tmp_path)


def test_a_split_without_targets_is_refused(tmp_path):
    # The second pair has a target and is too long for a row.
    prefix = write_pairs(tmp_path, [(5, 0), (12, 5)])
    with pytest.raises(DataError, match="has no targets to learn") as raised:
        make(prefix, tmp_path)
    assert "1 pairs that fit" in str(raised.value)


def test_rows_go_through_a_loader_into_a_batch(tmp_path):
    dataset = make(write_pairs(tmp_path, [(2, 3), (4, 1), (3, 3)]), tmp_path)
    loader = build_data_loader(
        pickle.loads(pickle.dumps(dataset)),
        consumed_samples=0,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=0,
    )
    raw = next(iter(loader))
    batch = packed_batch(**raw, prefix_lm=True)
    assert batch.tokens.shape == (2, 15)
    learned = batch.loss_mask.bool()
    assert torch.equal(raw["is_input"][:, 1:][learned], torch.zeros(int(learned.sum()), dtype=int))
    # every target token but none of the padding is learned once
    is_target = (raw["is_input"] == 0) & (raw["segment_ids"] != 0)
    assert learned.sum() == is_target.sum()
