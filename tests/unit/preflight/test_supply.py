"""What a training takes of its corpora, from lengths of documents alone."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.data.data_utils import Corpus
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.t5_data import t5_data
from megatron.data.samples.packing import build_packed_indices
from megatron.preflight.supply import absent_corpora, supply, training_supply
from tests.support.examples import examples
from tests.support.tiny import TOKENS_PER_SAMPLE, write_tiny_corpus
from tests.unit.preflight.plans import plan

TAKEN = 24  # samples of a tiny run


def tokens_of(prefix: str, start: float, end: float) -> int:
    sizes = MMapIndexedDataset(prefix).sizes
    return int(sizes[round(start * len(sizes)) : round(end * len(sizes))].sum())


def test_the_training_split_of_each_corpus_is_counted(tmp_path: Path) -> None:
    one, other = (write_tiny_corpus(tmp_path / name, seed=len(name)) for name in ("a", "bb"))
    first, second = training_supply(plan(one, data_path=("3", one, "1", other), split="50,50"))
    assert (first.prefix, first.share, first.samples) == (one, 0.75, 18)
    assert (second.prefix, second.share, second.samples) == (other, 0.25, 6)
    assert first.tokens == tokens_of(one, 0, 0.5)
    assert first.documents == second.documents == 80
    assert first.epochs == 18 / ((first.tokens - 1) // TOKENS_PER_SAMPLE)


def test_a_corpus_for_training_alone_is_taken_whole(tmp_path: Path) -> None:
    prefix = write_tiny_corpus(tmp_path)
    separate = plan(prefix, data_path=None, train_data_path=(prefix,), split="969, 30, 1")
    (one,) = training_supply(separate)
    assert one.tokens == tokens_of(prefix, 0, 1)
    weighted = (f"T: 1 0.25:0.75 {prefix}",)
    flags = {"data_path": None, "split": "969, 30, 1", "train_weighted_split_paths": weighted}
    (part,) = training_supply(plan(prefix, **flags))
    assert part.tokens == tokens_of(prefix, 0.25, 0.75)


def test_more_samples_than_tokens_are_several_epochs(tmp_path: Path) -> None:
    prefix = write_tiny_corpus(tmp_path, documents=40)
    (one,) = training_supply(plan(prefix, split="1", train_iters=1000))
    assert one.epochs is not None
    assert one.tokens is not None
    assert one.epochs == pytest.approx(8000 * TOKENS_PER_SAMPLE / one.tokens, rel=0.05)
    assert one.epochs > 100


def test_a_corpus_that_is_not_here_has_a_share_and_no_tokens(tmp_path: Path) -> None:
    here, absent = write_tiny_corpus(tmp_path), str(tmp_path / "elsewhere")
    mixture = plan(here, data_path=("1", here, "1", absent))
    assert absent_corpora(mixture) == (absent,)
    known, unknown = training_supply(mixture)
    assert known.samples == unknown.samples == TAKEN // 2
    assert known.tokens
    assert (unknown.documents, unknown.tokens, unknown.epochs) == (None, None, None)


def test_a_corpus_without_its_index_is_here(tmp_path: Path) -> None:
    prefix = write_tiny_corpus(tmp_path)
    Path(f"{prefix}.idx").unlink()
    damaged = plan(prefix)
    assert absent_corpora(damaged) == ()  # so that its check says what is missing
    assert training_supply(damaged)[0].tokens is None


def test_mock_data_take_nothing() -> None:
    assert training_supply(plan(data_path=None, mock_data=True)) == []
    assert absent_corpora(plan(data_path=None, mock_data=True)) == ()


def test_pairs_are_samples_each() -> None:
    pairs = dataclasses.replace(
        plan("nowhere", mtf=True), reads=t5_data(EncoderDecoderConfig(decoder_num_layers=0))
    )
    corpus = Corpus("p", None, 3, (), np.array([4, 0, 7]))
    assert supply(pairs, [(corpus, 0, 3)]) == (11, 3)


@examples(60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 99))
def test_one_pass_over_documents_never_gives_more_rows_than_are_counted_on(
    lengths: list[int], seed: int
) -> None:
    row = TOKENS_PER_SAMPLE + 1
    if not any(0 < length <= row for length in lengths):
        return
    run_plan = plan("nowhere", sft=True, on_too_long_document="skip")
    corpus = Corpus("p", None, len(lengths), (), np.array(lengths))
    tokens, most = supply(run_plan, [(corpus, 0, len(lengths))])
    assert tokens == sum(length for length in lengths if length <= row)
    packed = build_packed_indices(
        np.array(lengths), np.arange(len(lengths)), num_samples=50, row_length=row, seed=seed
    )
    # Rows of the first pass: those whose last document is one of it.
    assert int((packed["sample_idx"][:, 1] <= len(lengths)).sum()) <= most
