"""BERT's items, one by one, against a naive version written from the description of Megatron's."""

import pickle

import numpy as np
import pytest

from megatron.data.bert_dataset import BERTDataset, BERTRecipe
from megatron.data.data_utils import DocumentSlice
from megatron.data.loading.loaders import build_data_loader
from megatron.errors import DataError
from tests.unit.data.corpora import cache_in
from tests.unit.data.samples.test_masking import naive_masking
from tests.unit.data.sentence_corpora import (
    CLS,
    PAD,
    SEP,
    VOCABULARY,
    random_documents,
    write_sentences,
)

SEED = 1234
KEYS = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask", "truncated"]


def naive_item(sentences, index, *, target, seq_length, probability, binary_head, seed=SEED):
    """One item as it is described, list by list; shares no code with the library."""
    rng = np.random.RandomState((seed + index) % 2**32)
    is_random = 0
    if binary_head:
        n = len(sentences)
        a_end = rng.randint(1, n) if n >= 3 else 1
        a = [token for sentence in sentences[:a_end] for token in sentence]
        b = [token for sentence in sentences[a_end:] for token in sentence]
        if rng.random() < 0.5:
            a, b, is_random = b, a, 1
    else:
        a, b = [token for sentence in sentences for token in sentence], []
    truncated = int(len(a) + len(b) > target)
    while len(a) + len(b) > target:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()
    tokens, types = [CLS, *a, SEP], [0] * (len(a) + 2)
    if b:
        tokens, types = [*tokens, *b, SEP], types + [1] * (len(b) + 1)
    text, positions, _ = naive_masking(
        tokens, rng, probability=probability, target=target, style="bert"
    )
    empty = seq_length - len(tokens)
    labels, loss_mask = [-1] * seq_length, [0] * seq_length
    for position in positions:
        labels[position], loss_mask[position] = tokens[position], 1
    return {
        "text": text + [PAD] * empty,
        "types": types + [0] * empty,
        "labels": labels,
        "is_random": is_random,
        "loss_mask": loss_mask,
        "padding_mask": [1] * len(tokens) + [0] * empty,
        "truncated": truncated,
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return write_sentences(folder / "corpus", random_documents(80))


def make(corpus, folder, *, num_samples=200, seq_length=48, seed=SEED, **recipe):
    return BERTDataset(
        corpus,
        DocumentSlice(name="train", start=10, stop=70),
        recipe=BERTRecipe(vocabulary=VOCABULARY, seq_length=seq_length, seed=seed, **recipe),
        num_samples=num_samples,
        cache=cache_in(folder),
    )


@pytest.mark.parametrize("binary_head", [True, False])
@pytest.mark.parametrize(
    ("seq_length", "probability"), [(48, 0.15), (200, 0.15), (5, 0.5), (48, 0.0)]
)
def test_items_are_those_of_the_naive_version(
    corpus, tmp_path, binary_head, seq_length, probability
):
    dataset = make(
        corpus,
        tmp_path,
        seq_length=seq_length,
        masked_lm_prob=probability,
        short_seq_prob=0.3,
        binary_head=binary_head,
    )
    seen = {"is_random": set(), "truncated": set()}
    for i in range(len(dataset)):
        start, stop, target = dataset.samples.row(i)
        item = dataset[i]
        assert list(item) == KEYS
        assert {value.dtype for value in item.values()} == {np.dtype(np.int64)}
        assert {key: value.tolist() for key, value in item.items()} == naive_item(
            [corpus.get(sentence).tolist() for sentence in range(start, stop)],
            i,
            target=target,
            seq_length=seq_length,
            probability=probability,
            binary_head=binary_head,
        )
        for key, values in seen.items():
            values.add(int(item[key]))
    assert seen["is_random"] == ({0, 1} if binary_head else {0})


def test_a_sum_of_seed_and_index_beyond_32_bits_goes_on(corpus, tmp_path):
    dataset = make(corpus, tmp_path, seed=2**32 - 1)
    start, stop, target = dataset.samples.row(7)
    expected = naive_item(
        [corpus.get(sentence).tolist() for sentence in range(start, stop)],
        7,
        target=target,
        seq_length=48,
        probability=0.15,
        binary_head=True,
        seed=2**32 - 1,
    )
    assert dataset[7]["text"].tolist() == expected["text"]


def test_there_are_at_least_as_many_samples_as_were_asked(corpus, tmp_path):
    for wanted in (1, 60, 500):
        assert len(make(corpus, tmp_path, num_samples=wanted)) >= wanted
    with pytest.raises(IndexError, match="sample -1 of train"):
        make(corpus, tmp_path)[-1]


def test_whatever_an_item_depends_on_changes_the_fingerprint(corpus, tmp_path):
    made = [
        make(corpus, tmp_path),
        make(corpus, tmp_path, seq_length=49),
        make(corpus, tmp_path, seed=1),
        make(corpus, tmp_path, masked_lm_prob=0.2),
        make(corpus, tmp_path, short_seq_prob=0.11),
        make(corpus, tmp_path, binary_head=False),
    ]
    assert len({dataset.fingerprint() for dataset in made}) == len(made)
    assert make(corpus, tmp_path).fingerprint() == made[0].fingerprint()


def test_documents_of_one_sentence_give_the_binary_head_nothing_and_say_so(tmp_path):
    corpus = write_sentences(tmp_path / "c", [[9]] * 80)
    with pytest.raises(DataError, match="no document gives a sample"):
        make(corpus, tmp_path)
    assert len(make(corpus, tmp_path, binary_head=False)) >= 200


def test_an_item_longer_than_its_row_is_refused(corpus, tmp_path, monkeypatch):
    dataset = make(corpus, tmp_path, seq_length=20, short_seq_prob=0.0)
    start, stop, _ = dataset.samples.row(0)
    monkeypatch.setattr(dataset.samples, "row", lambda index: [start, stop, 10**6])
    monkeypatch.setattr(
        dataset.samples, "sentences", lambda start, stop: [np.full(30, 40, np.uint16)] * 2
    )
    with pytest.raises(DataError, match="sample 0 of train is longer than its row") as caught:
        dataset[0]
    assert "63 tokens; room for 20" in str(caught.value)


@pytest.mark.parametrize("changes", [{"seq_length": 4}, {"masked_lm_prob": 1.1}])
def test_a_recipe_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=r"seq_length .* masked_lm_prob"):
        BERTRecipe(**({"vocabulary": VOCABULARY, "seq_length": 48, "seed": 0} | changes))


def test_a_copy_in_another_process_gives_the_same_items(corpus, tmp_path):
    dataset = make(corpus, tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    copy.check_unchanged()
    assert (copy.fingerprint(), len(copy)) == (dataset.fingerprint(), len(dataset))
    assert copy[5]["text"].tolist() == dataset[5]["text"].tolist()


def test_a_loader_stacks_items_into_batches(corpus, tmp_path):
    dataset = make(corpus, tmp_path)
    loader = build_data_loader(
        dataset,
        consumed_samples=4,
        micro_batch_size=2,
        data_parallel_rank=1,
        data_parallel_size=2,
        num_workers=0,
    )
    batch = next(iter(loader))
    assert batch["text"].tolist() == [dataset[i]["text"].tolist() for i in (6, 7)]
    assert batch["is_random"].tolist() == [int(dataset[i]["is_random"]) for i in (6, 7)]
