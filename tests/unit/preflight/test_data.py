"""Corpora that are missing, damaged, foreign or too small are found from their headers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus_metadata import CorpusMetadata
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.preflight import data as rules
from megatron.preflight.run import Check
from tests.support.tiny import write_tiny_corpus
from tests.unit.preflight.plans import found, only, plan

ALL = [
    rules.corpora_open_and_are_whole,
    rules.corpora_fit_the_tokenizer,
    rules.splits_hold_enough_samples,
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_tiny_corpus(tmp_path)


@pytest.mark.parametrize("check", ALL)
def test_a_good_plan_passes(corpus: str, check: Check) -> None:
    assert found(check, plan(corpus, eval_iters=1)) == []


def test_a_missing_corpus_is_found_once(tmp_path: Path) -> None:
    bad = plan(str(tmp_path / "none"))
    only(found(rules.corpora_open_and_are_whole, bad), "none")
    assert found(rules.corpora_fit_the_tokenizer, bad) == []
    assert found(rules.splits_hold_enough_samples, bad) == []


def test_a_corpus_cut_short_is_found(corpus: str) -> None:
    tokens = Path(corpus + ".bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    only(found(rules.corpora_open_and_are_whole, plan(corpus)), ".bin")


def test_tokens_beyond_the_vocabulary_are_found(corpus: str) -> None:
    only(
        found(rules.corpora_fit_the_tokenizer, plan(corpus, vocab_size=40)),
        "holds tokens that the tokenizer does not have",
        "--tokenizer-type NullTokenizer has 41 tokens",
    )
    unknown = dataclasses.replace(plan(corpus, vocab_size=40), tokenizer=None)
    assert found(rules.corpora_fit_the_tokenizer, unknown) == []


def test_a_corpus_of_another_vocabulary_is_found_by_its_metadata(tmp_path: Path) -> None:
    metadata = CorpusMetadata(tokenizer_type="GPT2BPETokenizer", vocab_size=5000, eod=4999)
    prefix = tmp_path / "foreign"
    with MMapIndexedDatasetBuilder(prefix, np.uint16, metadata=metadata) as builder:
        builder.add_document(np.arange(10))
    only(
        found(rules.corpora_fit_the_tokenizer, plan(str(prefix))),
        "another vocabulary than this run's",
        "GPT2BPETokenizer with 5000 tokens",
        "NullTokenizer with 51",
    )


def test_an_empty_split_that_is_used_is_found(corpus: str) -> None:
    used = plan(corpus, eval_iters=1, split="100,0,0")
    errors = [str(error) for error in found(rules.splits_hold_enough_samples, used)]
    assert len(errors) == 2
    assert "the valid split has no documents" in errors[0]
    assert "the test split has no documents" in errors[1]
    assert "--eval-iters 0" in errors[0]
    assert found(rules.splits_hold_enough_samples, plan(corpus, split="100,0,0")) == []


def test_a_split_smaller_than_a_batch_is_found(corpus: str) -> None:
    only(
        found(rules.splits_hold_enough_samples, plan(corpus, split="1,99,0")),
        "the train split has fewer samples than one global batch",
        "the global batch has 8",
    )


def test_evaluation_without_data_of_its_own_is_found(corpus: str) -> None:
    apart = plan(
        corpus, data_path=None, train_data_path=(corpus,), test_data_path=(corpus,), eval_iters=1
    )
    only(
        found(rules.splits_hold_enough_samples, apart),
        "evaluation is on, but there is no valid data",
        "--valid-data-path",
    )


@pytest.mark.parametrize(
    "flags", [{"split": "a,b"}, {"world_size": 3}, {"tensor_model_parallel_size": 2}]
)
def test_what_other_checks_say_is_not_said_twice(corpus: str, flags: dict[str, object]) -> None:
    assert found(rules.splits_hold_enough_samples, plan(corpus, **flags)) == []  # type: ignore[arg-type]
