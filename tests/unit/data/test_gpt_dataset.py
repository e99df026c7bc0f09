"""The order is Megatron's to the bit, and every sample is a window of its stream."""

import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import log
from megatron.data import gpt_dataset
from megatron.data.gpt_dataset import GPTDataset, build_gpt_indices, plan_epochs
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import DataError
from tests.support.examples import examples
from tests.unit.data.corpora import (
    METADATA,
    cache_in,
    open_corpus,
    random_sizes,
    real_gpt2_corpora,
    write_corpus,
)

SYNTHETIC_SIZES = random_sizes(1000, seed=7, most=400)


def make(corpus, folder, **changes):
    options = {
        "name": "train",
        "documents": np.arange(len(corpus)),
        "num_samples": 10,
        "seq_length": 8,
        "seed": 1234,
        "cache": cache_in(folder),
    }
    return GPTDataset(corpus, **(options | changes))


def short_hash(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def naive_order(sizes, documents, num_samples, seq_length, seed, cutoff=0.95):
    """The recipe of docs/data.md step by step, token by token; shares no code with the library."""
    tokens = sum(sizes[d] for d in documents)
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    samples = (epochs * tokens - 1) // seq_length
    split_at, separate = samples, False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // seq_length
        if num_samples - before < int(cutoff * ((tokens - 1) // seq_length)):
            split_at, separate = before, True
    rng = np.random.RandomState(seed)
    groups = [epochs - 1, 1] if separate else [epochs]
    doc_idx = []
    for group in groups:
        part = np.array(list(documents) * group, np.int32)
        rng.shuffle(part)
        doc_idx += part.tolist()
    sample_idx, seen = [(0, 0)], 0
    for position, document in enumerate(doc_idx):
        for offset in range(sizes[document]):
            if seen and seen % seq_length == 0 and len(sample_idx) <= samples:
                sample_idx.append((position, offset))
            seen += 1
    head, tail = np.arange(split_at, dtype=np.uint32), np.arange(split_at, samples, dtype=np.uint32)
    rng.shuffle(head)
    if len(tail):
        rng.shuffle(tail)
    return (
        np.array(doc_idx, np.int32),
        np.array(sample_idx, np.int32),
        np.concatenate([head, tail]),
    )


# Hashes of doc_idx, sample_idx and shuffle_idx of the first 969 documents. Those of the reference
# corpus come from the reference implementation; those of the synthetic one from naive_order().
REAL = [
    (100, 128, 1234, "876051b4c0cd5c20", "01da6ca6bc98c859", "a13a384b5a5e7410"),
    (100, 1024, 42, "4fb43dd3b6a3b885", "4558b9c19fb874b0", "447f045bd7f144c1"),
    (40000, 512, 1234, "0dad953e4d3aeca3", "eabf0d42b657af9f", "b9c658ac416cf914"),
]
SYNTHETIC = [
    (100, 128, 1234, "876051b4c0cd5c20", "62cab44d9b765f26", "4fe0d26ac9e33665"),
    (100, 1024, 42, "4fb43dd3b6a3b885", "728b87ba4794209e", "943fe53867e4b437"),
    (6000, 512, 1234, "0dad953e4d3aeca3", "f432056b85baeedd", "9f11b107a793219a"),
]
GOLDEN = [(None, *row) for row in SYNTHETIC] + [
    (prefix, *row) for prefix in real_gpt2_corpora() for row in REAL
]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("synthetic") / "c", SYNTHETIC_SIZES)


@pytest.mark.parametrize(("prefix", "samples", "seq_length", "seed", *"abc"), GOLDEN)
def test_orders_have_their_golden_hashes(
    prefix, samples, seq_length, seed, a, b, c, synthetic, tmp_path
):
    corpus = MMapIndexedDataset(prefix or synthetic)
    dataset = make(
        corpus,
        tmp_path,
        documents=np.arange(969),
        num_samples=samples,
        seq_length=seq_length,
        seed=seed,
    )
    arrays = [np.load(dataset.index_files[k]) for k in ("doc_idx", "sample_idx", "shuffle_idx")]
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.uint32]
    assert [short_hash(array) for array in arrays] == [a, b, c]


@examples(60)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=10).filter(any),
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.95, 0.8]),
)
def test_any_order_is_the_naive_one(sizes, num_samples, seq_length, seed, cutoff):
    documents = np.arange(len(sizes), dtype=np.int32)
    plan = plan_epochs(sum(sizes), num_samples, seq_length=seq_length, last_epoch_cutoff=cutoff)
    indices = build_gpt_indices(
        np.array(sizes, np.int32), documents, plan=plan, seq_length=seq_length, seed=seed
    )
    expected = naive_order(sizes, documents, num_samples, seq_length, seed, cutoff)
    for key, array in zip(("doc_idx", "sample_idx", "shuffle_idx"), expected):
        assert indices[key].dtype == array.dtype
        assert indices[key].tobytes() == array.tobytes(), key
    assert sorted(indices["shuffle_idx"].tolist()) == list(range(plan.num_samples))
    assert plan.num_samples >= num_samples


@examples(25)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.integers(1, 30),
    st.integers(1, 9),
)
def test_samples_cover_the_shuffled_stream_in_order(
    tmp_path_factory, sizes, num_samples, seq_length
):
    folder = tmp_path_factory.mktemp("cover")
    corpus = open_corpus(folder, sizes)
    dataset = make(corpus, folder, num_samples=num_samples, seq_length=seq_length)
    doc_idx = np.load(dataset.index_files["doc_idx"])
    stream = np.concatenate([corpus[document] for document in doc_idx.tolist()])
    place = np.argsort(np.load(dataset.index_files["shuffle_idx"]))
    for number in range(len(dataset)):
        window = stream[number * seq_length : (number + 1) * seq_length + 1]
        text = dataset[place[number]]["text"]
        assert text.dtype == np.int64
        assert text.tolist() == window.tolist()


def test_a_tiny_corpus_takes_many_epochs_without_a_spurious_error():
    # 11 tokens an epoch, sequences of 4, 5 samples: the last epoch gives more than its own two.
    plan = plan_epochs(11, 5, seq_length=4, last_epoch_cutoff=0.95)
    assert (plan.num_epochs, plan.num_samples, plan.last_epoch_is_separate) == (2, 5, False)
    assert plan_epochs(1, 3, seq_length=100, last_epoch_cutoff=0.95).num_epochs == 301


def test_the_cutoff_decides_whether_the_last_epoch_is_apart():
    # 1001 tokens, sequences of 10: 100 samples in one epoch, 200 in two; 90 of the second wanted.
    assert plan_epochs(1001, 190, seq_length=10, last_epoch_cutoff=0.95).last_epoch_is_separate
    assert not plan_epochs(1001, 190, seq_length=10, last_epoch_cutoff=0.80).last_epoch_is_separate


def test_only_the_documents_of_the_split_are_read(tmp_path):
    corpus = open_corpus(tmp_path, [10, 10, 10, 10])
    dataset = make(corpus, tmp_path, documents=np.array([1, 3]), num_samples=4, seq_length=4)
    seen = {int(token) for i in range(len(dataset)) for token in dataset[i]["text"]}
    assert seen <= {*range(10, 20), *range(30, 40)}


@pytest.mark.parametrize("index", [-1, 12, 10**9])
def test_an_index_outside_the_dataset_never_wraps(tmp_path, index):
    dataset = make(open_corpus(tmp_path, [50, 50]), tmp_path, num_samples=12)
    assert len(dataset) == 12
    with pytest.raises(IndexError, match="which has 12 samples"):
        dataset[index]


def test_any_integer_type_is_an_index(tmp_path):
    dataset = make(open_corpus(tmp_path, [50, 50]), tmp_path)
    assert dataset[np.int64(3)]["text"].tolist() == dataset[3]["text"].tolist()


def test_a_split_without_documents_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match=r"the valid split of .* has no documents"):
        make(open_corpus(tmp_path, [5]), tmp_path, name="valid", documents=np.arange(0))


def test_a_split_without_tokens_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match="has no tokens"):
        make(open_corpus(tmp_path, [0, 0, 5]), tmp_path, documents=np.arange(2))


@pytest.mark.parametrize(
    "changes", [{"num_samples": 0}, {"seq_length": 0}, {"documents": np.array([3])}]
)
def test_impossible_parameters_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=r"1 or more|documents 3\.\.3"):
        make(open_corpus(tmp_path, [5]), tmp_path, **changes)


def test_a_corpus_of_sentences_is_refused_when_its_sidecar_says_so(tmp_path):
    import dataclasses

    sentences = dataclasses.replace(METADATA, level="sentence")
    prefix = write_corpus(tmp_path / "c", [5, 5], metadata=sentences)
    with pytest.raises(DataError, match="split into sentences"):
        make(MMapIndexedDataset(prefix), tmp_path)


def test_a_corpus_that_may_be_of_sentences_is_announced(tmp_path, capsys, monkeypatch):
    from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder

    monkeypatch.setattr(log._OUTPUT, "warned", set())
    with MMapIndexedDatasetBuilder(tmp_path / "c") as builder:
        builder.add_document(np.arange(20), [10, 10])
    make(MMapIndexedDataset(tmp_path / "c"), tmp_path)
    assert "2 items in 1 documents" in capsys.readouterr().err


def test_a_sample_of_another_length_is_refused(tmp_path, monkeypatch):
    dataset = make(open_corpus(tmp_path, [50, 50]), tmp_path)
    monkeypatch.setattr(dataset, "seq_length", 9)
    with pytest.raises(DataError, match="another length than the sequence length"):
        dataset[0]


def test_the_order_is_loaded_not_built_when_it_is_cached(tmp_path, monkeypatch):
    corpus = open_corpus(tmp_path, [50, 50])
    first = make(corpus, tmp_path)

    def fail(*_, **__):
        raise AssertionError("built again")

    monkeypatch.setattr(gpt_dataset, "build_gpt_indices", fail)
    again = make(corpus, tmp_path)
    assert again.fingerprint() == first.fingerprint()
    assert again[0]["text"].tolist() == first[0]["text"].tolist()


def test_whatever_the_order_depends_on_changes_the_fingerprint(tmp_path):
    corpus = open_corpus(tmp_path, [50, 50, 20])
    (tmp_path / "other").mkdir()
    datasets = [
        make(corpus, tmp_path),
        make(corpus, tmp_path, seed=1),
        make(corpus, tmp_path, seq_length=9),
        make(corpus, tmp_path, documents=np.arange(2)),
        make(corpus, tmp_path, num_samples=100),
        make(open_corpus(tmp_path / "other", [50, 51, 20]), tmp_path),
    ]
    assert len({dataset.fingerprint() for dataset in datasets}) == len(datasets)


def test_a_dataset_travels_to_another_process_without_its_arrays(tmp_path):
    dataset = make(open_corpus(tmp_path, random_sizes(2000)), tmp_path, num_samples=5000)
    sent = pickle.dumps(dataset)
    assert len(sent) < 3000
    assert pickle.loads(sent)[17]["text"].tolist() == dataset[17]["text"].tolist()


def test_a_touched_corpus_is_noticed(tmp_path):
    import os

    dataset = make(open_corpus(tmp_path, [50]), tmp_path)
    dataset.check_unchanged()
    os.utime(dataset.indexed.prefix + ".bin", ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was in use"):
        dataset.check_unchanged()


def test_a_corpus_too_large_for_32_bits_has_64_bit_documents(tmp_path, monkeypatch):
    corpus = open_corpus(tmp_path, [5, 5])
    monkeypatch.setattr(gpt_dataset, "_MOST_INT32", 1)
    assert gpt_dataset._checked_documents(corpus, np.arange(2), "train").dtype == np.int64
