"""Splits of documents and their cached maps."""

import dataclasses
import os
import pickle
from functools import partial

import numpy as np
import pytest

from megatron import log
from megatron.data.data_utils import DocumentSlice
from megatron.data.orders.sentence_maps import SentenceRule
from megatron.data.samples import sentence_samples
from megatron.data.samples.sentence_samples import SentenceSamples
from megatron.errors import DataError
from tests.unit.data.corpora import METADATA, cache_in
from tests.unit.data.sentence_corpora import random_documents, write_sentences

RULE = SentenceRule(num_samples=30, max_tokens=40, min_sentences=2, seed=5, short_seq_prob=0.1)
DOCUMENTS = DocumentSlice(name="train", start=0, stop=40)


@pytest.fixture
def corpus(tmp_path):
    return write_sentences(tmp_path / "corpus", random_documents(60))


def make(corpus, folder, documents=DOCUMENTS, rule=RULE, **options):
    return SentenceSamples(corpus, documents, rule=rule, cache=cache_in(folder), **options)


def refuse_to_build(*_):
    raise AssertionError("built although the cache has it")


def test_a_map_is_built_once_and_then_found(corpus, tmp_path, monkeypatch):
    built = make(corpus, tmp_path)
    monkeypatch.setattr(sentence_samples, "build_sentence_map", refuse_to_build)
    found = make(corpus, tmp_path)
    assert found.index_files == built.index_files
    assert [found.row(i) for i in range(len(found))] == [built.row(i) for i in range(len(built))]


def test_whatever_the_map_depends_on_is_another_entry(corpus, tmp_path):
    other_corpus = write_sentences(tmp_path / "other", random_documents(60, seed=1))
    replaced = partial(dataclasses.replace, RULE)
    made = [
        make(corpus, tmp_path),
        make(other_corpus, tmp_path),
        make(corpus, tmp_path, dataclasses.replace(DOCUMENTS, start=1)),
        make(corpus, tmp_path, dataclasses.replace(DOCUMENTS, stop=41)),
        make(corpus, tmp_path, rule=replaced(num_samples=31)),
        make(corpus, tmp_path, rule=replaced(max_tokens=41)),
        make(corpus, tmp_path, rule=replaced(min_sentences=1)),
        make(corpus, tmp_path, rule=replaced(seed=6)),
        make(corpus, tmp_path, rule=replaced(short_seq_prob=0.104)),
        make(corpus, tmp_path, rule=replaced(short_seq_prob=0.0)),
        make(corpus, tmp_path, rule=replaced(short_seq_prob=0.0), title_sizes=np.zeros(40, "i4")),
        make(corpus, tmp_path, rule=replaced(short_seq_prob=0.0), title_sizes=np.ones(40, "i4")),
    ]
    assert len({samples.fingerprint() for samples in made}) == len(made)
    assert len({samples.index_files["rows"] for samples in made}) == len(made)
    assert made[0].fingerprint(kind="a") != made[0].fingerprint(kind="b")


def test_rows_name_sentences_of_the_split_alone(corpus, tmp_path):
    documents = DocumentSlice(name="valid", start=40, stop=60)
    samples = make(corpus, tmp_path, documents)
    first, last = corpus.doc_idx[40], corpus.doc_idx[60]
    for i in range(len(samples)):
        start, stop, _ = samples.row(i)
        assert first <= start < stop <= last
        sentences = samples.sentences(start, stop)
        expected = [corpus.get(sentence).tolist() for sentence in range(start, stop)]
        assert [sentence.tolist() for sentence in sentences] == expected


def test_an_index_outside_never_wraps(corpus, tmp_path):
    samples = make(corpus, tmp_path)
    for index in (-1, len(samples)):
        with pytest.raises(IndexError, match=f"sample {index} of train"):
            samples.row(index)


def test_a_sample_draws_alike_for_whoever_reads_it_and_beyond_32_bits(corpus, tmp_path):
    samples = make(corpus, tmp_path, rule=dataclasses.replace(RULE, seed=2**32 - 1))
    assert samples.generator(3).randint(100) == np.random.RandomState(2).randint(100)


def test_a_split_without_documents_is_refused(corpus, tmp_path):
    with pytest.raises(DataError, match=r"the train split of .* has no documents"):
        make(corpus, tmp_path, dataclasses.replace(DOCUMENTS, start=40))
    with pytest.raises(ValueError, match="of a corpus of 60 documents"):
        make(corpus, tmp_path, dataclasses.replace(DOCUMENTS, stop=61))


def test_a_corpus_whose_sidecar_says_document_is_refused(tmp_path):
    corpus = write_sentences(tmp_path / "c", random_documents(60), metadata=METADATA)
    with pytest.raises(DataError, match="is not split into sentences"):
        make(corpus, tmp_path)


def test_a_corpus_of_one_item_a_document_is_announced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    corpus = write_sentences(tmp_path / "c", [[5]] * 60)
    make(corpus, tmp_path, rule=dataclasses.replace(RULE, min_sentences=1))
    assert "one item in each of its 60 documents" in capsys.readouterr().err


def test_a_change_of_the_corpus_is_noticed(corpus, tmp_path):
    samples = make(corpus, tmp_path)
    samples.check_unchanged()
    os.utime(corpus.prefix + ".bin", (1, 1))
    with pytest.raises(DataError, match="changed"):
        samples.check_unchanged()


def test_a_copy_in_another_process_reads_the_same(corpus, tmp_path):
    samples = make(corpus, tmp_path)
    copy = pickle.loads(pickle.dumps(samples))
    assert copy.fingerprint() == samples.fingerprint()
    assert [copy.row(i) for i in range(len(copy))] == [samples.row(i) for i in range(len(copy))]
