"""What a program reads becomes the three datasets of the loop."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.data.bert_dataset import BERTDataset
from megatron.data.kinds.program_data import BERT_DATA
from megatron.engine.base import DatasetRequest
from megatron.engine.datasets import datasets_of
from megatron.errors import ConfigError
from megatron.initialize import tokenizer_of
from tests.support.tiny_bert import tiny_bert_run, write_tiny_sentences


def test_a_use_that_is_off_has_no_dataset(tmp_path: Path) -> None:
    config = tiny_bert_run(write_tiny_sentences(tmp_path))
    waited: list[bool] = []
    built = datasets_of(BERT_DATA)(
        DatasetRequest(
            data=config.data,
            tokenizer=tokenizer_of(config),
            num_samples=(40, 8, 0),
            min_samples=8,
            seed=1,
            is_builder=True,
            wait=lambda: waited.append(True),
        )
    )
    assert isinstance(built.train, BERTDataset)
    assert len(built.train) >= 40
    assert len(built.valid) >= 8
    assert built.test is None
    assert waited


def test_flags_that_datasets_do_not_read_are_refused(tmp_path: Path) -> None:
    """Also where no checks ran before, as in a tool that shows samples."""
    config = tiny_bert_run(write_tiny_sentences(tmp_path))
    request = DatasetRequest(
        data=replace(config.data, fim_data=True, eod_mask_loss=True),
        tokenizer=tokenizer_of(config),
        num_samples=(40, 8, 0),
        min_samples=8,
        seed=1,
        is_builder=True,
        wait=lambda: None,
    )
    with pytest.raises(ConfigError, match=r"--fim-data True\n.*\n.*\n.*--eod-mask-loss True"):
        datasets_of(BERT_DATA)(request)
