"""The flags choose one kind, and a prefix is opened as what that kind reads or refused by name."""

import dataclasses

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.dataset_kind import (
    DatasetKind,
    dataset_kind,
    flags_unread_by_bert,
    flags_unread_by_gpt,
    flags_unread_by_pairs,
    flags_unread_by_prefix_lm,
    open_of_kind,
    pairs_dataset_kind,
    prefix_dataset_kind,
)
from megatron.errors import ConfigError, DataError
from tests.unit.data.corpora import METADATA, write_corpus
from tests.unit.data.dialogues import write_dialogues, write_pairs
from tests.unit.data.sentence_corpora import write_sentences


def flags(**changes):
    return DataConfig(**({"seq_length": 16, "data_path": ("p",)} | changes))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, DatasetKind.GPT),
        ({"fim_data": True, "fim_rate": 1.0}, DatasetKind.FIM),
        ({"sft": True}, DatasetKind.SFT),
        ({"mtf": True}, DatasetKind.MTF),
        ({"noise_density": 0.15}, DatasetKind.MLM),
        ({"data_path": None, "mock_data": True}, DatasetKind.MOCK),
    ],
)
def test_one_flag_chooses_the_kind(changes, kind):
    assert dataset_kind(flags(**changes)) is kind
    assert kind.is_packed == (kind in (DatasetKind.SFT, DatasetKind.MTF))
    assert kind.level == "document"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mask_prob", 0.2),
        ("short_seq_prob", 0.0),
        ("bert_binary_head", False),
    ],
)
def test_what_only_sentences_know_is_refused_for_a_gpt(name, value):
    (error,) = flags_unread_by_gpt(flags(**{name: value}))
    assert isinstance(error, ConfigError)
    assert error.problem == "a flag was given that has no effect on the data of a GPT"
    assert error.found == f"--{name.replace('_', '-')} {value}"


def test_every_flag_that_is_not_read_is_found():
    many = flags(mask_prob=0.2, short_seq_prob=0.0, bert_binary_head=False, fim_data=True)
    assert [error.found for error in flags_unread_by_gpt(many)] == [
        "--mask-prob 0.2",
        "--short-seq-prob 0.0",
        "--bert-binary-head False",
    ]
    assert [error.found for error in flags_unread_by_bert(many)] == [
        "--fim-data True",
    ]
    assert dataset_kind(many) is DatasetKind.FIM


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, DatasetKind.PREFIX),
        ({"data_path": None, "mock_data": True}, DatasetKind.PREFIX),
        ({"mtf": True}, DatasetKind.MTF),
        ({"noise_density": 0.15}, DatasetKind.MLM),
    ],
)
def test_what_has_inputs_needs_no_drawn_prefixes(changes, kind):
    given = flags(loss_on_targets_only=True, **changes)
    assert prefix_dataset_kind(given) is kind
    assert pairs_dataset_kind(given) is DatasetKind.MTF
    assert not list(flags_unread_by_prefix_lm(given))
    errors = [error.found for error in flags_unread_by_pairs(given)]
    assert errors == ([] if kind is DatasetKind.MTF else [f"flags for {dataset_kind(given)}"])
    assert not DatasetKind.PREFIX.can_be_cut


@pytest.mark.parametrize(
    ("changes", "problem", "found"),
    [
        ({"sft": True}, "rows of dialogues have no prefix", "--sft"),
        ({"fim_data": True}, "windows of text with middles to fill in have no", "--fim-data"),
        ({"mask_prob": 0.2}, "no effect on the data of a prefix LM", "--mask-prob 0.2"),
        (
            {"mtf": True, "reweight_loss_based_on_position_frequency": True},
            "behind a prefix of random length",
            "--reweight-loss-based-on-position-frequency, and the data are rows of pairs",
        ),
    ],
)
def test_what_has_no_prefix_is_refused_for_a_prefix_lm(changes, problem, found):
    (error,) = flags_unread_by_prefix_lm(flags(**changes))
    assert problem in error.problem
    assert error.found == found


def test_a_gpt_has_targets_in_rows_of_pairs_and_dialogues_alone():
    (error,) = flags_unread_by_gpt(flags(loss_on_targets_only=True))
    assert error.problem == "a loss on targets only needs data that have targets"
    assert error.found == "--loss-on-targets-only without --mtf or --sft"
    for kind in ("mtf", "sft"):
        assert not list(flags_unread_by_gpt(flags(loss_on_targets_only=True, **{kind: True})))
    (error,) = flags_unread_by_gpt(flags(reweight_loss_based_on_position_frequency=True))
    assert error.problem.endswith("behind a prefix, and there is none")


def test_a_corpus_is_counted_in_what_a_split_divides(tmp_path):
    text = write_corpus(tmp_path / "text", [3, 4])
    sentences = write_sentences(tmp_path / "sentences", [[2, 3], [4]]).prefix
    dialogues = write_dialogues(tmp_path / "chats", [([1, 2], [0, 1])] * 3)
    pairs = write_pairs(tmp_path / "pairs", [([1, 2], [3])] * 4)
    found = {
        kind: open_of_kind(kind, prefix, MMapIndexedDataset)
        for kind, prefix in (
            (DatasetKind.GPT, text),
            (DatasetKind.BERT, sentences),
            (DatasetKind.SFT, dialogues),
            (DatasetKind.MTF, pairs),
        )
    }
    assert [corpus.num_documents for corpus in found.values()] == [2, 2, 3, 4]
    assert [len(corpus.files) for corpus in found.values()] == [1, 1, 1, 2]
    assert [int(np.sum(corpus.lengths)) for corpus in found.values()] == [7, 9, 6, 12]
    assert found[DatasetKind.SFT].files[0].prefix == f"{dialogues}_tokens_document"


@pytest.mark.parametrize(
    ("kind", "level", "fix"),
    [
        (DatasetKind.GPT, "sentence", "preprocess it without --split-sentences"),
        (DatasetKind.FIM, "sentence", "preprocess it without --split-sentences"),
        (DatasetKind.BERT, "document", "preprocess it with --split-sentences"),
    ],
)
def test_a_corpus_of_another_level_is_refused(tmp_path, kind, level, fix):
    metadata = dataclasses.replace(METADATA, level=level)
    prefix = write_corpus(tmp_path / "c", [3, 4], metadata=metadata)
    with pytest.raises(DataError, match="split into sentences") as raised:
        open_of_kind(kind, prefix, MMapIndexedDataset)
    assert raised.value.fix == fix


@pytest.mark.parametrize(
    ("kind", "flag", "part", "tool"),
    [
        (DatasetKind.SFT, "--sft", "tokens", "tools/preprocess_sft.py"),
        (DatasetKind.MTF, "--mtf", "inputs", "--json-keys inputs targets"),
    ],
)
def test_a_single_corpus_is_no_pair_of_them(tmp_path, kind, flag, part, tool):
    text = write_corpus(tmp_path / "text", [3, 4])
    with pytest.raises(DataError, match=f"{flag} reads two corpora of one prefix") as raised:
        open_of_kind(kind, text, MMapIndexedDataset)
    assert tool in raised.value.fix
    half = write_corpus(tmp_path / f"p_{part}_document", [3, 4])
    with pytest.raises(DataError, match=f"{flag} reads two corpora of one prefix") as raised:
        open_of_kind(kind, half, MMapIndexedDataset)
    assert raised.value.fix == f"leave the ending out: {tmp_path / 'p'}"
    with pytest.raises(DataError, match="cannot be opened"):
        open_of_kind(kind, str(tmp_path / "p"), MMapIndexedDataset)
