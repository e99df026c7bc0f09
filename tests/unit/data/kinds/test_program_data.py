"""Each program's flags mean the same to its checks and to its datasets."""

import pytest

from megatron.config.data import DataConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.program_data import (
    BERT_DATA,
    GPT_DATA,
    PAIRS_DATA,
    PREFIX_DATA,
    ict_data,
)
from tests.unit.data.sentence_corpora import Pieces


def flags(**changes):
    return DataConfig(**({"seq_length": 16, "data_path": ("p",)} | changes))


def test_the_same_flags_are_another_kind_to_another_program():
    assert GPT_DATA.kind(flags()) is DatasetKind.GPT
    assert BERT_DATA.kind(flags(mask_prob=0.2, bert_binary_head=False)) is DatasetKind.BERT
    assert PREFIX_DATA.kind(flags()) is DatasetKind.PREFIX
    assert PAIRS_DATA.kind(flags()) is DatasetKind.MTF
    (error,) = GPT_DATA.unread_flags(flags(mask_prob=0.2))
    assert error.problem == "a flag was given that has no effect on the data of a GPT"
    assert not [*BERT_DATA.unread_flags(flags(mask_prob=0.2, bert_binary_head=False))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sft", True),
        ("mtf", True),
        ("noise_density", 0.15),
        ("reset_position_ids", True),
        ("eod_mask_loss", True),
        ("loss_on_targets_only", True),
        ("reweight_loss_based_on_position_frequency", True),
    ],
)
def test_a_flag_that_a_bert_would_not_read_is_refused(name, value):
    (error,) = BERT_DATA.unread_flags(flags(**{name: value}))
    assert error.problem == "a flag was given that has no effect on the data of a BERT"
    assert error.found == f"--{name.replace('_', '-')} {value}"


def test_a_bert_is_not_made_without_a_tokenizer():
    with pytest.raises(ValueError, match="not made without a tokenizer"):
        BERT_DATA.maker(flags(), tokenizer=None, seed=1, is_builder=True)


def test_a_retriever_reads_blocks_and_questions_alone():
    retrieval = RetrievalConfig(query_in_block_prob=0.7, use_one_sent_docs=True)
    reads = ict_data(retrieval)
    assert reads.kind(flags()) is DatasetKind.ICT
    assert [error.found for error in reads.unread_flags(flags(mtf=True, mask_prob=0.2))] == [
        "--mtf True",
        "--mask-prob 0.2",
    ]
    with pytest.raises(ValueError, match="not made without a tokenizer"):
        reads.maker(flags(), tokenizer=None, seed=1, is_builder=True)


def test_the_flags_of_a_retriever_decide_its_blocks():
    reads = ict_data(RetrievalConfig(query_in_block_prob=0.7, use_one_sent_docs=True))
    maker = reads.maker(flags(), tokenizer=Pieces(), seed=1, is_builder=True)
    recipe = maker.dataset.keywords["recipe"]
    assert (recipe.query_in_block_prob, recipe.one_sentence_documents) == (0.7, True)
