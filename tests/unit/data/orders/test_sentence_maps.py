"""Sentence and block maps: golden hashes, compiled loop and twin alike, no endless loop."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.orders import sample_maps, sentence_maps
from megatron.data.orders.sentence_maps import (
    SentenceRule,
    build_block_map,
    build_block_map_with_python,
    build_sentence_map,
    build_sentence_map_with_python,
)
from megatron.errors import DataError
from tests.support.examples import examples
from tests.unit.data.orders.test_sample_maps import compiled  # noqa: F401  # builds what is not built

EVERYTHING = 10**18
SENTENCE_MAPS = [build_sentence_map, build_sentence_map_with_python]
BLOCK_MAPS = [build_block_map, build_block_map_with_python]


def short_hash(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def golden():
    """The synthetic corpus whose maps were built by the reference's compiled helpers."""
    rng = np.random.RandomState(0)
    borders = np.concatenate([[0], np.cumsum(rng.randint(0, 12, 200))]).astype(np.int64)
    sizes = rng.randint(1, 60, 1039).astype(np.int32)
    sizes[10] = 600
    titles = rng.randint(1, 8, 200).astype(np.int32)
    hashes = [short_hash(array) for array in (borders, sizes, titles)]
    assert hashes == ["e3e5675a3231099a", "a0fe48dbe77ed9d5", "9e7061411c14f15d"]
    return borders, sizes, titles


def one_epoch(min_sentences, short_seq_prob=0.0):
    return SentenceRule(
        num_samples=EVERYTHING,
        max_tokens=125,
        min_sentences=min_sentences,
        seed=1234,
        short_seq_prob=short_seq_prob,
        num_epochs=1,
    )


@pytest.mark.parametrize("build", SENTENCE_MAPS)
@pytest.mark.parametrize(
    ("min_sentences", "short", "num_rows", "expected"),
    [(2, 0.1, 255, "62919ea7c4c43387"), (1, 0.0, 262, "9080f9febf905bab")],
)
def test_sentence_maps_have_the_hashes_of_the_reference(
    build, min_sentences, short, num_rows, expected, golden
):
    borders, sizes, _ = golden
    rows = build(borders, sizes, one_epoch(min_sentences, short))
    assert (rows.shape, rows.dtype) == ((num_rows, 3), np.uint32)
    assert short_hash(rows) == expected


@pytest.mark.parametrize("build", BLOCK_MAPS)
def test_block_maps_have_the_hash_of_the_reference(build, golden):
    borders, sizes, titles = golden
    rows = build(borders, sizes, titles, one_epoch(2))
    assert (rows.shape, rows.dtype) == ((253, 4), np.uint32)
    assert short_hash(rows) == "7051f855ed0b9b51"


documents = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 5, 20, 512, 513]), max_size=7), min_size=1, max_size=12
)
rules = st.builds(
    SentenceRule,
    num_samples=st.integers(1, 60),
    max_tokens=st.integers(2, 60),
    min_sentences=st.integers(1, 3),
    seed=st.sampled_from([0, 1, 1234, 2**31 - 1, 2**32 - 1]),
    short_seq_prob=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    num_epochs=st.sampled_from([1, 2, sentence_maps.UNLIMITED_EPOCHS]),
)


def corpus(lengths):
    """`doc_idx` and `sizes` of documents of these sentences, which begin after three others."""
    borders = np.cumsum([3, *map(len, lengths)])
    return borders.astype(np.int64), np.array([9, 9, 9, *itertools.chain(*lengths)], np.int32)


def outcome(build, *arguments):
    """What is compared: the rows with their type, or the message of the error."""
    try:
        rows = build(*arguments)
    except DataError as error:
        return str(error)
    return rows.dtype, rows.shape, rows.tobytes()


@examples(150)
@given(documents, rules)
def test_compiled_sentence_map_and_twin_are_equal(lengths, rule):
    assert sample_maps.compiled_is_used()
    borders, sizes = corpus(lengths)
    assert outcome(build_sentence_map, borders, sizes, rule) == outcome(
        build_sentence_map_with_python, borders, sizes, rule
    )


@examples(150)
@given(documents, rules, st.data())
def test_compiled_block_map_and_twin_are_equal(lengths, rule, data):
    borders, sizes = corpus(lengths)
    titles = data.draw(st.lists(st.integers(0, 70), min_size=len(lengths), max_size=len(lengths)))
    arguments = (borders, sizes, np.array(titles, np.int32))
    rule = dataclasses.replace(rule, short_seq_prob=0.0)
    assert outcome(build_block_map, *arguments, rule) == outcome(
        build_block_map_with_python, *arguments, rule
    )


@examples(100)
@given(documents, rules)
def test_every_sentence_of_a_usable_document_is_in_one_row_per_epoch(lengths, rule):
    borders, sizes = corpus(lengths)
    usable = [
        (start, stop)
        for start, stop in itertools.pairwise(borders.tolist())
        if stop - start >= rule.min_sentences
        and (stop - start == 1 or max(sizes[start:stop]) <= 512)
    ]
    if not usable:
        return
    rows = build_sentence_map(borders, sizes, rule)
    seen = np.zeros(len(sizes), int)
    for start, stop, target in rows.tolist():
        seen[start:stop] += 1
        assert stop - start >= min(rule.min_sentences, 2)  # the last run may hold just two
        assert 2 <= target <= rule.max_tokens
        assert any(first <= start and stop <= last for first, last in usable)
    epochs = seen[usable[0][0]]
    expected = np.zeros(len(sizes), int)
    for start, stop in usable:
        expected[start:stop] = epochs
    assert seen.tolist() == expected.tolist()
    assert len(rows) >= rule.num_samples or epochs == rule.num_epochs
    assert len(rows) < rule.num_samples + sum(stop - start for start, stop in usable)


@pytest.mark.parametrize("build", SENTENCE_MAPS)
def test_a_corpus_without_a_sample_is_refused_at_once(build):
    rule = SentenceRule(num_samples=5, max_tokens=20, min_sentences=2, seed=1)
    borders, sizes = corpus([[5], [4, 600], [], [7]])
    with pytest.raises(DataError, match="no document gives a sample") as caught:
        build(borders, sizes, rule)
    assert "4 documents: 3 of fewer than 2 sentences, 1 with a sentence of" in str(caught.value)
    assert "--split-sentences" in str(caught.value)


@pytest.mark.parametrize("build", BLOCK_MAPS)
def test_a_corpus_without_a_block_is_refused_at_once(build):
    rule = SentenceRule(num_samples=5, max_tokens=20, min_sentences=1, seed=1)
    borders, sizes = corpus([[600], []])
    with pytest.raises(DataError, match="no document gives a sample"):
        build(borders, sizes, np.zeros(2, np.int32), rule)


def test_one_long_sentence_is_a_sample_but_not_a_block():
    rule = SentenceRule(num_samples=1, max_tokens=20, min_sentences=1, seed=1)
    borders, sizes = corpus([[600]])
    assert build_sentence_map(borders, sizes, rule).tolist() == [[3, 4, 20]]
    with pytest.raises(DataError, match="no document gives"):
        build_block_map(borders, sizes, np.zeros(1, np.int32), rule)


def test_rows_are_64_bit_when_sentences_do_not_fit_in_32(monkeypatch, golden):
    borders, sizes, titles = golden
    rule = one_epoch(2)
    narrow, narrow_blocks = (
        build_sentence_map(borders, sizes, rule),
        build_block_map(borders, sizes, titles, rule),
    )
    monkeypatch.setattr(sentence_maps, "_MOST_UINT32", 1000)
    for build in SENTENCE_MAPS:
        rows = build(borders, sizes, rule)
        assert rows.dtype == np.uint64
        assert (rows == narrow).all()
    for build in BLOCK_MAPS:
        rows = build(borders, sizes, titles, rule)
        assert rows.dtype == np.uint64
        assert (rows == narrow_blocks).all()


def test_the_64_bit_generator_is_that_of_the_standard():
    """The C++ standard, [rand.predef]: the 10000th number of a default-constructed generator."""
    drawn = itertools.islice(sentence_maps._mt19937_64(5489), 9999, None)
    assert next(drawn) == 9981545732273789042
    assert next(itertools.islice(sentence_maps._mt19937(5489), 9999, None)) == 4123659995


@pytest.mark.parametrize(
    ("probability", "ratio"), [(0.0, 0), (0.1, 10), (0.4, 3), (0.6, 2), (1.0, 1), (1e-9, 10**9)]
)
def test_one_target_in_so_many_is_short(probability, ratio):
    assert one_epoch(1, probability).short_ratio == ratio


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": 0},
        {"num_samples": 2**63},
        {"min_sentences": 0},
        {"num_epochs": 0},
        {"max_tokens": 1},
        {"max_tokens": 2**32},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_a_rule_out_of_range_is_refused(changes):
    numbers = {"num_samples": 1, "max_tokens": 9, "min_sentences": 1, "seed": 0}
    with pytest.raises(ValueError, match="out of range"):
        SentenceRule(**(numbers | changes))


@pytest.mark.parametrize("probability", [-0.1, 1.1, 1e-10, float("nan")])
def test_a_share_of_short_samples_out_of_range_is_refused(probability):
    with pytest.raises(ValueError, match="short_seq_prob"):
        one_epoch(1, probability)


def test_borders_that_contradict_the_sizes_are_refused():
    sizes, rule = np.ones(4, np.int32), one_epoch(1)
    with pytest.raises(ValueError, match=r"doc_idx 0\.\.5 of 4 sentences"):
        build_sentence_map(np.array([0, 5]), sizes, rule)
    with pytest.raises(ValueError, match="decreases"):
        build_sentence_map(np.array([0, 3, 2, 4]), sizes, rule)
    with pytest.raises(ValueError, match="2 titles of 1 documents"):
        build_block_map(np.array([0, 4]), sizes, np.ones(2, np.int32), rule)
    with pytest.raises(ValueError, match=r"short_seq_prob 0\.1 of a block map"):
        build_block_map(np.array([0, 4]), sizes, np.ones(1, np.int32), one_epoch(1, 0.1))


def test_the_compiled_loops_refuse_wrong_arrays_by_themselves():
    module = sample_maps.compiled()
    assert module is not None
    sizes, rows = np.ones(4, np.int32), np.zeros((0, 3), np.uint32)
    starts, stops = np.array([0]), np.array([4])
    rule = (1, 1, 9, 0, 1, 1)
    assert module.fill_sentence_map(sizes, starts, stops, rows, *rule) == 1
    for wrong, error in (
        ((sizes, starts, stops + 1, rows, *rule), IndexError),
        ((sizes, starts - 1, stops, rows, *rule), IndexError),
        ((sizes, starts, starts, rows, *rule), ValueError),
        ((sizes, np.array([0, 1]), stops, rows, *rule), ValueError),
        ((sizes, starts, stops, np.zeros((0, 4), np.uint32), *rule), ValueError),
        ((sizes, starts, stops, rows, 1, 1, 1, 0, 1, 1), ValueError),
        ((sizes.astype(np.int64), starts, stops, rows, *rule), TypeError),
    ):
        with pytest.raises(error):
            module.fill_sentence_map(*wrong)
    blocks = np.zeros((0, 4), np.uint32)
    with pytest.raises(ValueError, match=r"\[rows, 4\]"):
        module.fill_block_map(sizes, starts, stops, rows, 1, 1, stops, starts, 1)
    with pytest.raises(ValueError, match="targets differ"):
        module.fill_block_map(sizes, starts, stops, blocks, 1, 1, np.array([1, 2]), starts, 1)


def test_without_a_compiled_module_the_twins_serve(monkeypatch, golden):
    borders, sizes, titles = golden
    monkeypatch.setattr(sample_maps, "_built", None)
    assert short_hash(build_sentence_map(borders, sizes, one_epoch(2, 0.1))) == "62919ea7c4c43387"
    assert short_hash(build_block_map(borders, sizes, titles, one_epoch(2))) == "7051f855ed0b9b51"
