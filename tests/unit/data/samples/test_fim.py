"""Rearranged documents are the documents, in other order, under three marks, as long as before."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.orders.sample_random import random_of_sample
from megatron.data.samples.fim import (
    FIMDataset,
    FIMTokenNames,
    FIMTokens,
    document_ranges,
    fill_in_the_middle,
    fim_tokens,
    token_named,
)
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in, open_corpus

EOD = 0
MARKS = FIMTokens(prefix=9001, suffix=9002, middle=9003)


class Windows:
    """A dataset of given rows."""

    def __init__(self, rows, name="windows"):
        self.rows, self.name, self.checked = rows, name, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if not 0 <= index < len(self.rows):
            raise IndexError(index)
        return {"text": np.array(self.rows[index], np.int64)}

    def fingerprint(self):
        return self.name

    def check_unchanged(self):
        self.checked += 1


def make(rows, **changes):
    options = {"tokens": MARKS, "eod": EOD, "rate": 1.0, "spm_rate": 0.5, "seed": 7}
    return FIMDataset(Windows(rows), **(options | changes))


def put_back(document):
    """The text of a rearranged document in its own order, or None if it is not rearranged."""
    if not document or document[0] != MARKS.prefix:
        return None
    suffix_at, middle_at = document.index(MARKS.suffix), document.index(MARKS.middle)
    assert sum(token in MARKS for token in document) == 3
    suffix, rest = document[suffix_at + 1 : middle_at], document[middle_at + 1 :]
    return document[1:suffix_at] + rest + suffix


def split(row):
    """Documents of a row, without their ends."""
    documents = [[]]
    for token in row:
        if token == EOD:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


ROWS = st.lists(st.lists(st.integers(0, 12), min_size=24, max_size=24), min_size=1, max_size=4)


@examples(150)
@given(ROWS, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_documents_keep_their_place_and_their_text(rows, rate, spm_rate, seed):
    dataset = make(rows, rate=rate, spm_rate=spm_rate, seed=seed)
    assert len(dataset) == len(rows)
    for index, row in enumerate(rows):
        text = dataset[index]["text"]
        assert text.dtype == np.int64
        assert len(text) == len(row)
        assert [i for i, t in enumerate(text) if t == EOD] == [
            i for i, t in enumerate(row) if t == EOD
        ]
        for before, after in zip(split(row), split(text.tolist()), strict=True):
            whole = put_back(after)
            assert after == before if whole is None else whole == before[:-3]
            if rate == 1.0 and len(before) >= 4:
                assert whole is not None
            if rate == 0.0 or len(before) < 4:
                assert whole is None


@examples(100)
@given(ROWS)
def test_ranges_are_the_documents_that_are_not_empty(rows):
    for row in rows:
        ranges = document_ranges(np.array(row), EOD)
        assert [row[start:stop] for start, stop in ranges] == [d for d in split(row) if d]


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_the_two_orders_are_those_of_the_paper(spm_rate):
    document = np.arange(100, 110)
    seen = set()
    for seed in range(200):
        rng = random_of_sample(seed, 0, use="test")
        out = fill_in_the_middle(document, MARKS, spm_rate=spm_rate, rng=rng).tolist()
        assert len(out) == 10
        assert put_back(out) == list(range(100, 107))
        prefix = out[1 : out.index(MARKS.suffix)]
        seen.add((len(prefix), len(out) - out.index(MARKS.middle)))
        if spm_rate:
            assert out[:2] == [MARKS.prefix, MARKS.suffix]
    assert len(seen) > (5 if spm_rate else 15)  # the cuts fall everywhere


def test_every_pair_of_cuts_comes_about_as_often_as_its_share():
    counts = np.zeros((4, 4), int)
    for seed in range(3200):
        rng = random_of_sample(seed, 0, use="test")
        out = fill_in_the_middle(np.arange(100, 106), MARKS, spm_rate=0.0, rng=rng).tolist()
        first = out.index(MARKS.suffix) - 1
        middle = len(out) - out.index(MARKS.middle) - 1
        counts[first, first + middle] += 1
    # 16 ordered draws of two of four borders; a pair of different ones comes up in two orders
    expected = np.triu(np.full((4, 4), 400)) - np.eye(4) * 200
    assert np.abs(counts - expected).max() < 5 * np.sqrt(400)


def test_a_sample_is_the_same_in_any_order_and_any_process(tmp_path):
    corpus = open_corpus(tmp_path, [30, 40, 50])
    windows = GPTDataset(
        corpus,
        name="train",
        documents=np.arange(3),
        num_samples=8,
        seq_length=12,
        seed=1,
        cache=cache_in(tmp_path),
    )
    dataset = FIMDataset(windows, tokens=MARKS, eod=29, rate=1.0, seed=3)
    forward = [dataset[i]["text"].tolist() for i in range(len(dataset))]
    other = pickle.loads(pickle.dumps(dataset))
    assert [other[i]["text"].tolist() for i in reversed(range(len(other)))] == forward[::-1]
    assert forward != [windows[i]["text"].tolist() for i in range(len(windows))]
    assert other.fingerprint() == dataset.fingerprint()
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_the_fingerprint_changes_with_the_data_and_every_parameter():
    rows = [[1, 2, 3]]
    prints = {
        make(rows).fingerprint(),
        make(rows, rate=0.5).fingerprint(),
        make(rows, spm_rate=0.25).fingerprint(),
        make(rows, seed=8).fingerprint(),
        make(rows, eod=11).fingerprint(),
        make(rows, tokens=MARKS._replace(middle=7)).fingerprint(),
        FIMDataset(
            Windows(rows, "other"), tokens=MARKS, eod=EOD, rate=1.0, spm_rate=0.5, seed=7
        ).fingerprint(),
    }
    assert len(prints) == 7


def test_a_touched_corpus_is_found_through_it():
    dataset = make([[1]])
    dataset.check_unchanged()
    assert dataset.dataset.checked == 1


def test_samples_of_another_kind_are_refused():
    class Pairs(Windows):
        def __getitem__(self, index):
            return {"text": np.zeros(3, np.int64), "segment_ids": np.zeros(3, np.int64)}

    with pytest.raises(ValueError, match="no plain windows"):
        FIMDataset(Pairs([[1]]), tokens=MARKS, eod=EOD, rate=1.0, seed=7)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": 1.5}, "--fim-rate is no share"),
        ({"rate": float("nan")}, "--fim-rate is no share"),
        ({"spm_rate": -0.1}, "--fim-spm-rate is no share"),
        ({"eod": None}, "without an end-of-document token"),
        ({"eod": MARKS.middle}, "not four different tokens"),
        ({"tokens": FIMTokens(1, 1, 2)}, "not four different tokens"),
    ],
)
def test_parameters_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make([[1]], **changes)


def test_an_error_below_arrives_as_itself():
    class Broken(Windows):
        def __getitem__(self, index):
            raise DataError("the corpus changed", fix="restart")

    with pytest.raises(DataError, match="the corpus changed"):
        FIMDataset(Broken([[1]]), tokens=MARKS, eod=EOD, rate=1.0, seed=7)[0]


# ---- the marks by their names


class Named:
    """A vocabulary of these pieces."""

    def __init__(self, *pieces):
        self.pieces = pieces

    @property
    def vocab_size(self):
        return len(self.pieces)

    def piece(self, token_id):
        return self.pieces[token_id]


STARCODER = ("a", "<fim_suffix>", "<fim_prefix>", "<fim_middle>")


def test_marks_are_found_by_their_names():
    assert fim_tokens(Named(*STARCODER), FIMTokenNames()) == FIMTokens(2, 1, 3)
    names = FIMTokenNames(prefix="<0x00>", suffix="<0x01>", middle="<0x02>")
    bytes_ = build_tokenizer(tokenizer_type="ByteTokenizer")
    assert fim_tokens(bytes_, names) == FIMTokens(0, 1, 2)
    assert token_named(Named(*STARCODER), "<fim_suffix>") == 1
    assert token_named(Named(*STARCODER), "<fim_pad>") is None


@pytest.mark.parametrize(
    ("pieces", "found", "fix"),
    [
        (
            ("a", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "--fim-prefix-token <fim_prefix>, --fim-suffix-token <fim_suffix>, "
            "--fim-middle-token <fim_middle>",
            "use --fim-prefix-token '<|fim_prefix|>' --fim-suffix-token '<|fim_suffix|>' "
            "--fim-middle-token '<|fim_middle|>'",
        ),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim-middle>"),
            "--fim-middle-token <fim_middle>",
            "use --fim-middle-token '<fim-middle>'",
        ),
        (
            ("a", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>"),
            "--fim-prefix-token <fim_prefix>",
            "use --fim-prefix-token '<extra_id_0>' --fim-suffix-token '<extra_id_1>' "
            "--fim-middle-token '<extra_id_2>'",
        ),
        (
            ("a", "b", "<s>"),
            "--fim-prefix-token <fim_prefix>",
            "add --vocab-extra-ids 3 and use --fim-prefix-token '<extra_id_0>' ",
        ),
    ],
)
def test_a_vocabulary_without_them_is_refused_with_what_would_work(pieces, found, fix):
    with pytest.raises(ConfigError, match="does not have the tokens that mark") as raised:
        fim_tokens(Named(*pieces), FIMTokenNames())
    assert raised.value.found.startswith(found)
    assert raised.value.fix.startswith(fix)
