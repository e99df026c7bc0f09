"""Flags become datasets, and each way of writing them wrong has its own message."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import log
from megatron.config.data import DataConfig, DataIntegrity
from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.corpus.weighted_paths import WeightedSplits, parse_weighted_groups
from megatron.data.data_utils import (
    SPLITS,
    IndexPlace,
    WeightedPrefix,
    build_train_valid_test_datasets,
    build_weighted_datasets,
    check_data_path,
    corpus_opener,
    named_prefixes,
    parse_data_path,
    parse_split,
    split_ranges,
)
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.dataset_makers import Windows
from megatron.errors import ConfigError, DataError
from tests.unit.data.corpora import random_sizes, write_corpus

CUTOFF = "last_epoch_cutoff"
PLACE = ("cache_path", "is_builder", "wait")


def build(folder, *, open_corpus=MMapIndexedDataset, **changes):
    options = {"data_path": None, "split": "969,30,1", "num_samples": (20, 0, 0)} | changes
    maker, options = maker_and_place(folder, open_corpus, options)
    separate = tuple(options.pop(f"{name}_data_path", None) for name in SPLITS)
    return build_train_valid_test_datasets(maker, separate=separate, **options)


def maker_and_place(folder, open_corpus, options):
    """The maker that some of `options` are of, and the other options."""
    order = {"seq_length": 8, "seed": 1234}
    order |= {name: options.pop(name) for name in (*order, CUTOFF) if name in options}
    place = {"cache_path": str(folder / "cache")}
    place |= {name: options.pop(name) for name in PLACE if name in options}
    maker = Windows(open_corpus=open_corpus, **order)
    return maker, options | {"place": IndexPlace(**place)}


# ---- --data-path


def test_a_path_is_one_prefix_or_pairs_of_weight_and_prefix():
    assert parse_data_path(("wiki",)) == [WeightedPrefix(1.0, "wiki")]
    assert parse_data_path(("0.3", "a", "7e-1", "b")) == [(0.3, "a"), (0.7, "b")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no corpus"),
        (("1", "a", "b"), "an odd number of words"),
        (("a", "b"), "the weight of a corpus is not a number: b"),
        (("a", "1"), "the weight of a corpus is not a number: 1"),
        (("nan", "a"), "the weight of a corpus is not finite: a"),
        (("1", "a", "inf", "b"), "the weight of a corpus is not finite: b"),
        (("0", "a"), "the weight of a corpus is not above zero: a"),
        (("-1", "a"), "the weight of a corpus is not above zero: a"),
    ],
)
def test_each_wrong_path_has_its_own_message(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_data_path(words)


def test_a_corpus_named_twice_is_announced(capsys, monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    parse_data_path(("1", "a", "2", "a"))
    assert "names a more than once" in capsys.readouterr().err


# ---- --split


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("8/1/1", (0.8, 0.1, 0.1)),
        ("3,1", (0.75, 0.25, 0.0)),
        ("100", (1.0, 0.0, 0.0)),
        ("0,0,5", (0.0, 0.0, 1.0)),
    ],
)
def test_a_split_becomes_fractions_of_one(text, fractions):
    assert parse_split(text) == fractions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "something that is no number"),
        ("969,thirty,1", "something that is no number"),
        ("1,2,3,4", "it has 4 parts"),
        ("2,-1", "0 or more"),
        ("nan,1", "0 or more"),
        ("inf,1", "0 or more"),
        ("0,0,0", "all parts are 0"),
    ],
)
def test_each_wrong_split_has_its_own_message(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_split(text)


@pytest.mark.parametrize(
    ("split", "documents", "borders"),
    [
        ("969,30,1", 1000, (0, 969, 999, 1000)),
        ("969,30,1", 10, (0, 10, 10, 10)),
        ("90,5,5", 10, (0, 10, 10, 10)),  # 9, round(0.5) = 0 twice: one short, all borders move
        ("1,1,1", 100, (0, 34, 67, 100)),
        ("5,5", 3, (0, 1, 3, 3)),  # round(1.5) = 2 twice: one too many
        ("1", 7, (0, 7, 7, 7)),
        ("0,5,5", 3, (0, 0, 1, 3)),  # Megatron's arithmetic alone would give -1, 1, 3
        ("0,5,5", 1, (0, 0, 1, 1)),
    ],
)
def test_borders_are_rounded_as_megatron_does(split, documents, borders):
    assert split_ranges(split, documents) == borders


@given(
    st.tuples(*[st.integers(0, 1000)] * 3).filter(any),
    st.integers(1, 5000),
)
def test_borders_cover_the_documents_once_and_give_nothing_to_a_zero(parts, documents):
    borders = split_ranges(",".join(map(str, parts)), documents)
    assert borders[0] == 0
    assert borders[-1] == documents
    assert list(borders) == sorted(borders)
    for part, start, stop in zip(parts, borders, borders[1:]):
        assert part > 0 or start == stop


# ---- datasets


def test_each_split_reads_its_own_documents(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 100)
    splits = build(tmp_path, data_path=(prefix,), split="80,10,10", num_samples=(30, 5, 5))
    tokens = [
        {int(t) // 10 for i in range(len(dataset)) for t in dataset[i]["text"]}
        for dataset in splits
    ]
    assert tokens[0] <= set(range(80))
    assert tokens[1] <= set(range(80, 90))
    assert tokens[2] <= set(range(90, 100))
    assert [len(splits.valid), len(splits.test)] == [12, 12]


def test_a_split_that_is_not_asked_for_is_none_even_without_documents(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 10)
    splits = build(tmp_path, data_path=(prefix,), split="100,0,0")
    assert isinstance(splits.train, GPTDataset)
    assert splits.valid is None
    assert splits.test is None


def test_a_share_of_zero_says_that_there_is_no_such_data(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", [10] * 10)
    splits = build(tmp_path, data_path=(prefix,), split="90,0,10", num_samples=(20, 4, 4))
    assert splits.valid is None
    assert isinstance(splits.test, GPTDataset)
    assert "--split 90,0,10: nothing is evaluated on valid data" in capsys.readouterr().out


def test_a_used_split_without_documents_names_the_split_and_the_fix(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 10)
    with pytest.raises(DataError, match=r"the valid split of .* has no documents") as raised:
        build(tmp_path, data_path=(prefix,), num_samples=(20, 4, 0))
    assert "--split" in str(raised.value)


def test_a_split_smaller_than_one_batch_names_the_split_and_the_fix(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 10)
    with pytest.raises(DataError, match="the train split holds less than one global batch") as r:
        build(tmp_path, data_path=(prefix,), num_samples=(1, 0, 0), min_samples=64)
    assert "12 samples; one batch takes 64" in str(r.value)


def test_a_blend_has_the_samples_asked_for_and_draws_from_each_component(tmp_path):
    a = write_corpus(tmp_path / "a", random_sizes(50, seed=1))
    b = write_corpus(tmp_path / "b", random_sizes(50, seed=2))
    train = build(
        tmp_path, data_path=("0.3", a, "0.7", b), split="1", num_samples=(1000, 0, 0)
    ).train
    assert isinstance(train, BlendableDataset)
    assert len(train) == 1000
    assert np.bincount(train.dataset_index).tolist() == [300, 700]
    assert [part.plan.num_samples >= n for part, n in zip(train.datasets, (302, 704))] == [True] * 2
    assert all(len(train[i]["text"]) == 9 for i in range(0, 1000, 50))


def test_a_component_of_a_blend_without_documents_is_named(tmp_path):
    a = write_corpus(tmp_path / "a", [10] * 100)
    b = write_corpus(tmp_path / "b", [10])
    with pytest.raises(DataError, match=f"the valid split of {b} has no documents"):
        build(tmp_path, data_path=("1", a, "1", b), split="90,10", num_samples=(10, 10, 0))


def test_separate_paths_are_used_whole(tmp_path):
    a = write_corpus(tmp_path / "a", [10] * 20)
    b = write_corpus(tmp_path / "b", [7] * 20)
    splits = build(tmp_path, train_data_path=(a,), valid_data_path=("1", b), num_samples=(5, 5, 0))
    assert splits.train.plan.tokens_per_epoch == 200
    assert splits.valid.plan.tokens_per_epoch == 140
    assert splits.test is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "there is no data"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "named in two ways at once"),
        (
            {"valid_data_path": ("b",)},
            "samples are requested of the train split, which has no corpus",
        ),
        ({"data_path": ("a",), "seed": -1}, "seed of the sample order"),
        ({"data_path": ("a",), "seed": 2**32}, "seed of the sample order"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, **changes)


def test_every_rank_reaches_one_barrier_per_index(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 100)
    for is_builder in (True, False):
        waits = []
        build(
            tmp_path,
            data_path=("1", prefix, "2", prefix),
            split="80,20",
            num_samples=(30, 5, 0),
            is_builder=is_builder,
            wait=lambda waits=waits: waits.append(1),
        )
        assert len(waits) == 4


def test_without_a_cache_path_indices_lie_beside_the_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 100)
    train = build(tmp_path, data_path=(prefix,), cache_path=None).train
    assert os.path.dirname(train.index_files["doc_idx"]) == str(tmp_path / "index-cache")


def test_the_same_data_gives_the_same_order_under_any_cache(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_sizes(100))
    one, other = (
        build(tmp_path, data_path=(prefix,), cache_path=str(tmp_path / name)).train
        for name in ("x", "y")
    )
    assert one.fingerprint() == other.fingerprint()
    assert [one[i]["text"].tolist() for i in range(20)] == [
        other[i]["text"].tolist() for i in range(20)
    ]


# ---- weighted ranges


def groups(*words):
    return parse_weighted_groups(words, flag="--x")


def build_groups(folder, train=(), valid=(), test=(), **changes):
    splits = WeightedSplits(groups(*train), groups(*valid), groups(*test))
    options = {"num_samples": (20, 4, 4)} | changes
    maker, options = maker_and_place(folder, MMapIndexedDataset, options)
    return build_weighted_datasets(maker, splits, **options)


def test_every_group_reads_its_own_ranges(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 100)
    splits = build_groups(
        tmp_path,
        train=(f"T: 1 0:0.5 {prefix}",),
        valid=(f"V: 1 0.5:0.7 {prefix}", f"W: 1 0.7:0.8 {prefix}"),
        test=(f"X: 1 0.8:0.9 {prefix}, 1 0.9:1 {prefix}",),
    )
    assert [*splits.valid, *splits.test] == ["V", "W", "X"]
    datasets = (splits.train, *splits.valid.values(), *splits.test.values())
    for dataset, (start, stop) in zip(datasets, [(0, 50), (50, 70), (70, 80), (80, 100)]):
        read = {int(t) // 10 for i in range(len(dataset)) for t in dataset[i]["text"]}
        assert read <= set(range(start, stop))
    assert isinstance(splits.test["X"], BlendableDataset)
    assert len(splits.test["X"]) == 4


def test_one_whole_range_is_the_same_order_as_the_whole_path(tmp_path):
    a = write_corpus(tmp_path / "a", random_sizes(60, seed=1))
    b = write_corpus(tmp_path / "b", random_sizes(60, seed=2))
    whole = build(tmp_path, train_data_path=("3", a, "1", b), num_samples=(50, 0, 0)).train
    ranged = build_groups(tmp_path, (f"T: 3 0:1 {a}, 1 0:1 {b}",), num_samples=(50, 0, 0)).train
    assert whole.fingerprint() == ranged.fingerprint()


def test_a_use_without_groups_is_said_and_has_no_dataset(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "c", [10] * 100)
    splits = build_groups(tmp_path, (f"T: 1 0:1 {prefix}",), num_samples=(20, 4, 0))
    assert (splits.valid, splits.test) == ({}, {})
    output = capsys.readouterr().out
    assert "no --valid-weighted-split-paths: nothing is evaluated on valid data" in output
    assert "test" not in output


def test_a_group_without_documents_or_samples_is_named(tmp_path):
    prefix = write_corpus(tmp_path / "c", [10] * 10)
    with pytest.raises(DataError, match=r"the V split of .* has no documents"):
        build_groups(tmp_path, (f"T: 1 0:1 {prefix}",), (f"V: 1 0.98:1 {prefix}",))
    with pytest.raises(DataError, match="the T split holds less than one global batch"):
        build_groups(tmp_path, (f"T: 1 0:1 {prefix}",), num_samples=(1, 0, 0), min_samples=64)
    with pytest.raises(ConfigError, match="seed of the sample order"):
        build_groups(tmp_path, (f"T: 1 0:1 {prefix}",), seed=-1)


# ---- what a mixture really gives


def test_a_blend_says_its_real_shares_and_epochs_once(tmp_path, capsys):
    a = write_corpus(tmp_path / "a", [10] * 50)  # 500 tokens, 62 samples of 8
    b = write_corpus(tmp_path / "b", [10] * 50)
    build(tmp_path, data_path=("0.25", a, "0.75", b), split="1", num_samples=(1000, 0, 0))
    output = capsys.readouterr().out
    assert "train is a blend of 1,000 samples:" in output
    assert f"{a}: weight 0.25, 250 samples (25.00%), 4 epochs" in output
    assert f"{b}: weight 0.75, 750 samples (75.00%), 12 epochs" in output


def test_a_corpus_too_rare_to_be_drawn_stops_training_and_is_announced_in_evaluation(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    a = write_corpus(tmp_path / "a", [10] * 100)
    b = write_corpus(tmp_path / "b", [10] * 100)
    path = ("1", a, "1e-3", b)
    with pytest.raises(ConfigError, match=f"too rare to be drawn once: {b}") as raised:
        build(tmp_path, data_path=path, split="1")
    assert "0.02 of 20 samples" in str(raised.value)
    build(tmp_path, data_path=path, split="8,2", num_samples=(2000, 4, 0))
    assert f"valid: a component of a blend is too rare to be drawn once: {b}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("asked", DataIntegrity)
def test_corpora_are_opened_as_the_flags_say(tmp_path, asked, mapped):
    prefix = write_corpus(tmp_path / "c", [10] * 20)
    data = DataConfig(
        seq_length=8, data_path=(prefix,), data_integrity=asked, mmap_bin_files=mapped
    )
    open_corpus = corpus_opener(data, is_builder=True)
    train = build(tmp_path, data_path=(prefix,), open_corpus=open_corpus).train
    assert (train.indexed.integrity, train.indexed.mapped) == (asked, mapped)
    waiting = corpus_opener(data, is_builder=False)(prefix)
    full = asked is DataIntegrity.FULL
    assert waiting.integrity is (DataIntegrity.TOUCHED if full else asked)


# ---- preflight


def test_a_check_finds_nothing_wrong_with_good_flags():
    whole = DataConfig(seq_length=8, data_path=("1", "a", "2", "b", "3", "a"))
    apart = DataConfig(seq_length=8, train_data_path=("a",), test_data_path=("2", "c"))
    ranges = DataConfig(
        seq_length=8,
        train_weighted_split_paths=("T: 1 0:1 x, 2 0:1 y",),
        valid_weighted_split_paths=("V: 1 0:1 x",),
    )
    assert check_data_path(whole) == check_data_path(apart) == []
    assert [named_prefixes(data) for data in (whole, apart, ranges)] == [
        ("a", "b"),
        ("a", "c"),
        ("x", "y"),
    ]


def test_a_check_reports_every_error_at_once():
    data = DataConfig(
        seq_length=8, train_data_path=("1", "a", "b"), valid_data_path=("x", "y"), split="-1"
    )
    errors = [str(error) for error in check_data_path(data)]
    assert len(errors) == 3
    assert "--split cannot be read" in errors[0]
    assert "an odd number of words" in errors[1]
    assert "the weight of a corpus is not a number" in errors[2]
    with pytest.raises(ConfigError, match="an odd number of words"):
        named_prefixes(data)
