"""Corrupted windows have the computed lengths, and hold the whole text of their window."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.data.data_utils import DocumentSlice
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.samples import mlm_dataset
from megatron.data.samples.mlm_dataset import (
    MLMDataset,
    SpanCorruption,
    corrupt_spans,
    lengths_of,
    random_parts,
    span_lengths,
    span_lengths_of_inputs,
)
from megatron.errors import ConfigError, DataError
from tests.support.examples import examples
from tests.unit.data.corpora import cache_in, open_corpus

SEP = 8000
SENTINELS = tuple(range(7000, 7200))
CORRUPTION = [field.name for field in fields(SpanCorruption)]


def make(corpus, folder, **changes):
    options = {
        "documents": DocumentSlice(name="train", start=0, stop=len(corpus)),
        "num_samples": 20,
        "seq_length": 66,
        "seed": 1234,
        "cache": cache_in(folder),
    }
    spans = {"sep": SEP, "sentinels": SENTINELS}
    spans |= {name: changes.pop(name) for name in CORRUPTION if name in changes}
    return MLMDataset(corpus, corruption=SpanCorruption(**spans), **(options | changes))


def restored(inputs, targets):
    """The text that inputs and targets were made of, one token after the other."""
    assert inputs[-1] == targets[-1] == SEP
    spans, text = {}, []
    for token in targets[:-1]:
        if token in SENTINELS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    for token in inputs[:-1]:
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


def works(raw, density, mean):
    """(inputs + targets) of a raw length by the formulas of T5, or None where a part is empty."""
    noise = round(raw * density)
    spans = round(noise / mean)
    if spans < 1 or noise < spans or raw - noise < spans:
        return None
    return (raw - noise + spans + 1) + (noise + spans + 1)


@examples(300)
@given(st.integers(1, 400), st.floats(0.05, 0.6), st.floats(1, 8))
def test_lengths_are_exact_or_the_nearest_that_work_are_named(seq_length, density, mean):
    # every length that works, also far above
    possible = {works(raw, density, mean) for raw in range(1, 1200)} - {None}
    assume(possible and max(possible) > 400)
    options = {"noise_density": density, "mean_noise_span_length": mean}
    if seq_length in possible:
        lengths = span_lengths(seq_length, **options)
        assert lengths.inputs + lengths.targets == lengths.total == seq_length
        assert works(lengths.raw_length, density, mean) == seq_length
        return
    below = [length for length in possible if length < seq_length]
    above = [length for length in possible if length > seq_length]
    expected = [max(below), min(above)] if below else [min(above)]
    with pytest.raises(ConfigError, match="fills the sequence length exactly") as raised:
        span_lengths(seq_length, **options)
    assert raised.value.fix == "use --seq-length " + " or ".join(map(str, expected))
    for length in expected:
        assert span_lengths(length, **options).total == length


def test_a_density_for_which_nothing_works_is_said():
    with pytest.raises(ConfigError, match="fills the sequence length exactly") as raised:
        span_lengths(512, noise_density=0.99, mean_noise_span_length=1.0)
    assert "use a --noise-density below 0.5" in raised.value.fix


def test_known_lengths_of_the_defaults():
    assert tuple(lengths_of(568, noise_density=0.15, mean_noise_span_length=3.0)) == (
        568, 512, 114, 28,
    )  # fmt: skip
    # 568 raw tokens give T5's inputs of 512 and targets of 114
    assert span_lengths(626).raw_length == 568


def test_inputs_alone_fill_an_encoder_with_as_much_text_as_fits():
    assert tuple(span_lengths_of_inputs(512)) == (568, 512, 114, 28)  # T5's own
    several = [
        raw
        for raw in range(1, 200)
        if lengths_of(raw, noise_density=0.5, mean_noise_span_length=3.0).inputs == 50
    ]
    assert len(several) > 1
    found = span_lengths_of_inputs(50, noise_density=0.5)
    assert (found.raw_length, found.inputs) == (max(several), 50)


@examples(100)
@given(st.integers(5, 300), st.floats(0.05, 0.5), st.floats(1.0, 5.0))
def test_inputs_fill_an_encoder_of_any_length_that_is_long_enough(length, density, mean):
    """A token more is kept, or a span begins, or neither: lengths of inputs have no gaps."""
    options = {"noise_density": density, "mean_noise_span_length": mean}
    shortest = next(
        found.inputs
        for found in (lengths_of(raw, **options) for raw in range(1, 400))
        if found.is_possible
    )
    if length >= shortest:
        assert span_lengths_of_inputs(length, **options).inputs == length
        return
    with pytest.raises(ConfigError, match="fills the sequence length exactly") as raised:
        span_lengths_of_inputs(length, **options)
    assert raised.value.fix == f"use --seq-length {shortest}"


@pytest.mark.parametrize("density", [0, 1, -0.1, float("nan")])
def test_a_density_that_is_none_is_refused(density):
    with pytest.raises(ConfigError, match="not between 0 and 1"):
        span_lengths(512, noise_density=density)


@pytest.mark.parametrize("mean", [0.5, 0, float("inf"), float("nan")])
def test_spans_shorter_than_a_token_are_refused(mean):
    with pytest.raises(ConfigError, match="shorter than one token"):
        span_lengths(512, mean_noise_span_length=mean)


@examples(150)
@given(st.data())
def test_corruption_loses_nothing_and_replaces_as_much_as_it_should(data):
    spans = data.draw(st.integers(1, 12))
    noise = data.draw(st.integers(spans, 40))
    kept = data.draw(st.integers(spans, 60))
    text = np.array(
        data.draw(st.lists(st.integers(0, 99), min_size=noise + kept, max_size=noise + kept))
    )
    rng = np.random.RandomState(data.draw(st.integers(0, 1000)))
    inputs, targets = corrupt_spans(
        text, spans=spans, noise=noise, marks=[*SENTINELS[:spans], SEP], rng=rng
    )
    assert (inputs.dtype, targets.dtype) == (np.int64, np.int64)
    assert len(inputs) == kept + spans + 1
    assert len(targets) == noise + spans + 1
    assert restored(inputs.tolist(), targets.tolist()) == text.tolist()
    marks = [token for token in inputs.tolist() if token in SENTINELS]
    assert marks == [t for t in targets.tolist() if t in SENTINELS] == list(SENTINELS[:spans])
    assert inputs[0] == text[0]  # kept text comes first
    assert targets[0] == SENTINELS[0]


@examples(100)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 1000))
def test_random_parts_are_positive_and_add_up(total, parts, seed):
    assume(parts <= total)
    lengths = random_parts(total, parts, np.random.RandomState(seed))
    assert len(lengths) == parts
    assert lengths.min() >= 1
    assert lengths.sum() == total


def test_every_way_to_cut_is_as_likely():
    rng = np.random.RandomState(0)
    counts = {}
    for _ in range(3000):
        parts = tuple(random_parts(5, 3, rng).tolist())
        counts[parts] = counts.get(parts, 0) + 1
    assert len(counts) == 6
    assert max(abs(count - 500) for count in counts.values()) < 5 * np.sqrt(500)


def test_samples_are_the_windows_of_a_gpt_order_with_exact_lengths(tmp_path):
    corpus = open_corpus(tmp_path, [100, 250, 33, 400])
    dataset = make(corpus, tmp_path)
    lengths = span_lengths(66)
    windows = GPTDataset(
        corpus,
        name="train",
        documents=np.arange(4),
        num_samples=20,
        seq_length=lengths.raw_length,
        seed=1234,
        cache=cache_in(tmp_path),
    )
    assert len(dataset) == len(windows) >= 20
    for index in range(len(dataset)):
        sample = dataset[index]
        assert {key: value.shape for key, value in sample.items()} == {
            "input_tokens": (lengths.inputs,),
            "target_tokens": (lengths.targets + 1,),
        }
        assert sum(len(part) for part in sample.values()) == 66 + 1
        text = restored(sample["input_tokens"].tolist(), sample["target_tokens"].tolist())
        assert text == windows[index]["text"].tolist()


def test_a_sample_is_the_same_in_any_order_and_any_process(tmp_path):
    dataset = make(open_corpus(tmp_path, [500, 700]), tmp_path)
    forward = [dataset[i]["input_tokens"].tolist() for i in range(len(dataset))]
    np.random.seed(5)
    other = pickle.loads(pickle.dumps(dataset))
    assert [other[i]["input_tokens"].tolist() for i in reversed(range(len(other)))] == forward[::-1]
    another_seed = make(dataset.windows.indexed, tmp_path, seed=4)
    assert [another_seed[i]["input_tokens"].tolist() for i in range(len(dataset))] != forward
    other.check_unchanged()
    with pytest.raises(IndexError):
        dataset[-1]


def test_the_fingerprint_changes_with_every_parameter(tmp_path):
    corpus = open_corpus(tmp_path, [500, 700])
    changes = [
        {},
        {"seed": 4},
        {"sep": SEP + 1},
        {"sentinels": SENTINELS[1:]},
        {"seq_length": 67},
        {"noise_density": 0.3, "seq_length": 67},
        {"documents": DocumentSlice(name="train", start=0, stop=1)},
    ]
    assert len({make(corpus, tmp_path, **change).fingerprint() for change in changes}) == 7


def test_a_touched_corpus_is_found(tmp_path):
    dataset = make(open_corpus(tmp_path, [500]), tmp_path)
    with open(tmp_path / "corpus.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match="changed"):
        dataset.check_unchanged()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sep": None}, "the tokenizer does not have"),
        ({"sentinels": (1,)}, "fewer sentinel tokens than spans"),
        ({"sep": SENTINELS[0]}, "two marks of span corruption are one token"),
    ],
)
def test_marks_that_are_not_enough_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        make(open_corpus(tmp_path, [500]), tmp_path, **changes)


def test_a_window_of_another_length_is_refused(tmp_path, monkeypatch):
    dataset = make(open_corpus(tmp_path, [500]), tmp_path)
    short = corrupt_spans

    def one_too_few(text, **options):
        return short(text[:-1], **options)

    monkeypatch.setattr(mlm_dataset, "corrupt_spans", one_too_few)
    with pytest.raises(DataError, match="other lengths than the sequence length gives"):
        dataset[0]


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no documents"):
        make(
            open_corpus(tmp_path, [500]),
            tmp_path,
            documents=DocumentSlice(name="train", start=0, stop=0),
        )
