"""Made-up samples count within documents, and are the same wherever they are computed."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samples.mock_dataset import MockDataset
from tests.support.examples import examples

EOD = 50


def make(**changes):
    options = {
        "name": "train",
        "num_samples": 20,
        "seq_length": 16,
        "seed": 1234,
        "vocab_size": 51,
        "eod": EOD,
    }
    return MockDataset(**(options | changes))


@examples(40)
@given(
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
    st.integers(0, 10**12),
    st.integers(2, 60),
)
def test_tokens_count_from_one_up_to_the_end_of_each_document(seq_length, seed, at, vocab_size):
    data = make(
        seq_length=seq_length,
        seed=seed,
        num_samples=10**12 + 1,
        vocab_size=vocab_size,
        eod=vocab_size - 1,
    )
    text = data[at]["text"]
    assert text.shape == (seq_length + 1,)
    assert text.dtype == np.int64
    eod = vocab_size - 1
    for token, following in itertools.pairwise(text.tolist()):
        starts = token == eod and following == 1 % vocab_size
        assert starts or following in ((token + 1) % vocab_size, eod)


def test_documents_follow_each_other_and_end_with_the_token_for_it():
    texts = [make()[at]["text"].tolist() for at in range(20)]
    assert any(text.count(EOD) > 1 for text in texts)
    for text in texts:
        for token, following in itertools.pairwise(text):
            assert following in ((1, EOD) if token == EOD else (token + 1, EOD))


def test_without_a_token_for_the_end_documents_start_again_at_one():
    texts = [make(eod=None)[at]["text"].tolist() for at in range(20)]
    pairs = {pair for text in texts for pair in itertools.pairwise(text)}
    assert all(after in (1, before + 1) for before, after in pairs)
    assert any(after == 1 for _, after in pairs)


@pytest.mark.parametrize(
    "other", [{"name": "valid"}, {"seed": 1}, {"seq_length": 17}, {"vocab_size": 9, "eod": 8}]
)
def test_another_dataset_has_other_samples_and_another_fingerprint(other):
    ours, theirs = make(), make(**other)
    assert ours.fingerprint() != theirs.fingerprint()
    assert any(not np.array_equal(ours[at]["text"], theirs[at]["text"]) for at in range(20))


def test_a_copy_in_another_process_has_the_same_samples():
    data = make()
    copy = pickle.loads(pickle.dumps(data))
    assert copy.fingerprint() == data.fingerprint()
    assert all(np.array_equal(copy[at]["text"], data[at]["text"]) for at in range(20))
    assert len({data[at]["text"].tobytes() for at in range(20)}) == 20
    data.check_unchanged()


@pytest.mark.parametrize("at", [-1, 20])
def test_samples_outside_are_refused(at):
    with pytest.raises(IndexError, match=f"sample {at} of train, which has 20 samples"):
        make()[at]
