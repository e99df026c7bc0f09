"""Prefixes are drawn from seed and sample alone, uniformly, and leave something behind them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samples.prefix_dataset import PrefixDataset
from tests.support.examples import examples
from tests.unit.data.samples.test_fim import Windows

EOD = 0
rows = st.lists(st.integers(0, 3), min_size=2, max_size=20)


def documents_of(text):
    """The lengths of the documents of the tokens that a model reads, ends included."""
    lengths, count = [], 0
    for token in text[:-1]:
        count += 1
        if token == EOD:
            lengths.append(count)
            count = 0
    return [*lengths, count] if count else lengths


@examples(200)
@given(rows, st.integers(0, 2**32 - 1))
def test_each_document_has_a_prefix_and_something_behind_it(text, seed):
    sample = PrefixDataset(Windows([text]), eod=EOD, seed=seed)[0]
    assert sample["text"].tolist() == text
    marks = sample["is_prefix"].tolist()
    assert len(marks) == len(text)
    at = 0
    for length in documents_of(text):
        prefix = sum(marks[at : at + length])
        assert prefix < length
        assert marks[at : at + length] == [1] * prefix + [0] * (length - prefix)
        at += length
    assert marks[-1] == 0


@examples(60)
@given(rows, st.integers(0, 2**32 - 1))
def test_a_row_has_one_prefix_whatever_ends_in_it(text, seed):
    marks = PrefixDataset(Windows([text]), eod=None, seed=seed)[0]["is_prefix"].tolist()
    assert marks == sorted(marks, reverse=True)
    assert sum(marks) < len(text) - 1 or sum(marks) == 0


def test_every_length_is_as_likely_as_any_other():
    rows_ = [[5] * 9] * 4000
    dataset = PrefixDataset(Windows(rows_), eod=EOD, seed=3)
    counts = np.bincount([int(dataset[i]["is_prefix"].sum()) for i in range(4000)])
    assert len(counts) == 8  # 0 to 7 of 8 tokens
    # 500 each; a standard deviation is 21.
    assert abs(counts - 500).max() < 5 * 21


def test_draws_follow_from_seed_and_sample_alone():
    rows_ = [[7, 7, EOD, 7, 7, 7, 7, 7, 7, 7]] * 30
    first, again = (PrefixDataset(Windows(rows_), eod=EOD, seed=3) for _ in range(2))
    marks = [first[i]["is_prefix"].tolist() for i in range(30)]
    assert [again[i]["is_prefix"].tolist() for i in reversed(range(30))] == marks[::-1]
    other = PrefixDataset(Windows(rows_), eod=EOD, seed=4)
    assert [other[i]["is_prefix"].tolist() for i in range(30)] != marks
    assert len({tuple(one) for one in marks}) > 5


def test_a_fingerprint_changes_with_all_that_decides_a_sample():
    rows_ = Windows([[1, 2]])
    found = {
        PrefixDataset(windows, eod=eod, seed=seed).fingerprint()
        for windows, eod, seed in (
            (rows_, EOD, 3),
            (rows_, None, 3),
            (rows_, EOD, 4),
            (Windows([[1, 2]], "others"), EOD, 3),
        )
    }
    assert len(found) == 4


def test_the_dataset_below_is_asked_and_other_samples_are_refused():
    windows = Windows([[1, 2]])
    dataset = PrefixDataset(windows, eod=EOD, seed=3)
    assert len(dataset) == 1
    dataset.check_unchanged()
    assert windows.checked == 1
    nested = PrefixDataset(dataset, eod=EOD, seed=3)
    with pytest.raises(ValueError, match="are no plain windows of text"):
        nested[0]
