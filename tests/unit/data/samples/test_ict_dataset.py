"""Blocks, the query sentence, and the title of the right document."""

import os
import pickle

import numpy as np
import pytest

from megatron.data.data_utils import DocumentSlice
from megatron.data.samples.ict_dataset import ICTDataset, ICTRecipe
from megatron.errors import DataError
from tests.unit.data.corpora import cache_in
from tests.unit.data.sentence_corpora import (
    CLS,
    PAD,
    SEP,
    VOCABULARY,
    random_documents,
    write_sentences,
)

SEED = 9
KEYS = ["query_tokens", "query_pad_mask", "context_tokens", "context_pad_mask", "block_data"]
START = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("ict") / "corpus", random_documents(80))


@pytest.fixture(scope="module")
def titles(tmp_path_factory):
    lengths = np.random.RandomState(3).randint(1, 6, 80).tolist()
    folder = tmp_path_factory.mktemp("titles")
    return write_sentences(folder / "titles", [[length] for length in lengths], seed=4)


def make(corpus, titles, folder, *, num_samples=150, **changes):
    recipe = {"vocabulary": VOCABULARY, "seq_length": 64, "seed": SEED} | changes
    return ICTDataset(
        corpus,
        DocumentSlice(name="valid", start=START, stop=80),
        titles=titles,
        recipe=ICTRecipe(**recipe),
        num_samples=num_samples,
        cache=cache_in(folder),
    )


def naive_item(corpus, titles, row, index, *, seq_length, stays, single):
    """One item as docs/data.md describes it, list by list."""
    start, stop, document, block = row
    document += START
    sentences = [corpus.get(sentence).tolist() for sentence in range(start, stop)]
    rng = np.random.RandomState((SEED + index) % 2**32)
    asked = rng.randint(0, len(sentences))
    query = list(sentences[asked])
    if not rng.random() < stays and len(sentences) > 1:
        sentences.pop(asked)
    assert len(sentences) > 0 or single
    text = [token for sentence in sentences for token in sentence]
    query = [CLS, *query[: seq_length - 2], SEP]
    if titles is None:
        context = [CLS, *text[: seq_length - 2], SEP]
    else:
        title = titles.get(document).tolist()
        context = [CLS, *title, SEP, *text[: seq_length - 3 - len(title)], SEP]
    item = {"block_data": [start, stop, document, block]}
    for key, tokens in (("query", query), ("context", context)):
        seen = [1] * len(tokens) + [0] * (seq_length - len(tokens))
        item[f"{key}_tokens"] = tokens + [PAD] * (seq_length - len(tokens))
        item[f"{key}_pad_mask"] = seen
    return item


@pytest.mark.parametrize("with_titles", [True, False])
@pytest.mark.parametrize(("stays", "single"), [(0.1, False), (1.0, False), (0.0, True)])
def test_items_are_those_of_the_naive_version(corpus, titles, tmp_path, with_titles, stays, single):
    titles = titles if with_titles else None
    dataset = make(
        corpus, titles, tmp_path, query_in_block_prob=stays, one_sentence_documents=single
    )
    for i in range(len(dataset)):
        item = dataset[i]
        assert list(item) == KEYS
        assert {value.dtype for value in item.values()} == {np.dtype(np.int64)}
        row = dataset.samples.row(i)
        expected = naive_item(corpus, titles, row, i, seq_length=64, stays=stays, single=single)
        assert {key: value.tolist() for key, value in item.items()} == expected


def test_a_block_has_the_title_of_the_document_that_it_lies_in(corpus, titles, tmp_path):
    dataset = make(corpus, titles, tmp_path)
    for i in range(len(dataset)):
        item = dataset[i]
        start, stop, document, _ = item["block_data"].tolist()
        assert corpus.doc_idx[document] <= start < stop <= corpus.doc_idx[document + 1]
        title = titles.get(document).tolist()
        assert item["context_tokens"][1 : len(title) + 1].tolist() == title


def test_the_same_sample_is_drawn_whatever_was_read_before(corpus, titles, tmp_path):
    dataset = make(corpus, titles, tmp_path)
    before = dataset[4]["query_tokens"].tolist()
    dataset[0], dataset[1]
    assert dataset[4]["query_tokens"].tolist() == before


def test_titles_of_another_corpus_are_refused(corpus, tmp_path):
    titles = write_sentences(tmp_path / "titles", [[2]] * 79)
    with pytest.raises(DataError, match="the titles are not those of the corpus") as caught:
        make(corpus, titles, tmp_path)
    assert "79 titles" in str(caught.value)


def test_a_title_that_leaves_no_room_is_refused_before_training(corpus, tmp_path):
    titles = write_sentences(tmp_path / "titles", [[2]] * 50 + [[61]] + [[2]] * 29)
    with pytest.raises(DataError, match="leaves no room for text") as caught:
        make(corpus, titles, tmp_path)
    assert "61 tokens of document 50; room for 61" in str(caught.value)


def test_documents_of_one_sentence_are_blocks_only_where_that_is_asked(tmp_path):
    corpus = write_sentences(tmp_path / "c", [[9]] * 80)
    with pytest.raises(DataError, match="no document gives a sample"):
        make(corpus, None, tmp_path)
    dataset = make(corpus, None, tmp_path, one_sentence_documents=True)
    assert dataset[0]["context_tokens"].tolist() == dataset[0]["query_tokens"].tolist()


def test_a_change_of_the_titles_is_noticed(corpus, tmp_path):
    titles = write_sentences(tmp_path / "titles", [[2]] * 80)
    dataset = make(corpus, titles, tmp_path)
    dataset.check_unchanged()
    os.utime(titles.prefix + ".bin", (1, 1))
    with pytest.raises(DataError, match="changed"):
        dataset.check_unchanged()


def test_whatever_an_item_depends_on_changes_the_fingerprint(corpus, titles, tmp_path):
    other = write_sentences(tmp_path / "titles", [[2]] * 80)
    made = [
        make(corpus, titles, tmp_path),
        make(corpus, other, tmp_path),
        make(corpus, None, tmp_path),
        make(corpus, titles, tmp_path, seq_length=65),
        make(corpus, titles, tmp_path, seed=1),
        make(corpus, titles, tmp_path, query_in_block_prob=0.2),
        make(corpus, titles, tmp_path, one_sentence_documents=True),
    ]
    assert len({dataset.fingerprint() for dataset in made}) == len(made)


@pytest.mark.parametrize("changes", [{"seq_length": 4}, {"query_in_block_prob": 1.5}])
def test_a_recipe_out_of_range_is_refused(changes):
    with pytest.raises(ValueError, match=r"seq_length .* query_in_block_prob"):
        ICTRecipe(**({"vocabulary": VOCABULARY, "seq_length": 64, "seed": 0} | changes))


def test_a_copy_in_another_process_gives_the_same_items(corpus, titles, tmp_path):
    dataset = make(corpus, titles, tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.fingerprint(), len(copy)) == (dataset.fingerprint(), len(dataset))
    assert copy[5]["context_tokens"].tolist() == dataset[5]["context_tokens"].tolist()
