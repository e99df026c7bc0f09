"""Each program's flags mean the same to its checks and to its datasets."""

import pytest

from megatron.config.data import DataConfig
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.program_data import BERT_DATA, GPT_DATA
from megatron.errors import ConfigError


def flags(**changes):
    return DataConfig(**({"seq_length": 16, "data_path": ("p",)} | changes))


def test_the_same_flags_are_another_kind_to_another_program():
    assert GPT_DATA.kind(flags()) is DatasetKind.GPT
    assert BERT_DATA.kind(flags(mask_prob=0.2, bert_binary_head=False)) is DatasetKind.BERT
    with pytest.raises(ConfigError, match="the data of a GPT do not know"):
        GPT_DATA.kind(flags(mask_prob=0.2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sft", True),
        ("mtf", True),
        ("noise_density", 0.15),
        ("reset_position_ids", True),
        ("eod_mask_loss", True),
        ("use_one_sent_docs", True),
    ],
)
def test_a_flag_that_a_bert_would_not_read_is_refused(name, value):
    with pytest.raises(ConfigError, match="the data of a BERT do not know") as caught:
        BERT_DATA.kind(flags(**{name: value}))
    assert f"--{name.replace('_', '-')} {value}" in str(caught.value)


def test_a_bert_is_not_made_without_a_tokenizer():
    with pytest.raises(ValueError, match="not made without a tokenizer"):
        BERT_DATA.maker(flags(), tokenizer=None, seed=1, is_builder=True)
