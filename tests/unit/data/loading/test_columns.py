"""Tensors of a raw batch by name."""

import pytest
import torch

from megatron.config.data import DataConfig
from megatron.data.loading.bert_batch import bert_batch
from megatron.data.loading.columns import columns
from megatron.data.loading.gpt_batch import decoder_batch
from megatron.errors import DataError

ROWS = torch.zeros(1, 3, dtype=torch.int64)


def test_tensors_come_in_the_order_of_their_names() -> None:
    raw = {"labels": ROWS, "text": ROWS + 1}
    text, labels = columns(raw, "text", "labels")
    assert text is raw["text"]
    assert labels is raw["labels"]
    assert columns({}) == ()


def test_what_is_missing_is_named_beside_what_is_there_and_what_is_near() -> None:
    raw = {"type": ROWS, "text": ROWS}
    with pytest.raises(DataError, match="a batch lacks tensors that the model takes") as caught:
        columns(raw, "text", "types", "padding_mask")
    assert caught.value.found == "no types (nearest: type), padding_mask; the batch has type, text"


def test_models_say_which_tensors_their_batches_lack() -> None:
    data = DataConfig(seq_length=2, mock_data=True)
    with pytest.raises(DataError, match="no text"):
        decoder_batch({"tokens": ROWS}, data, eod=None)
    with pytest.raises(DataError, match="no types, padding_mask, labels, loss_mask, is_random"):
        bert_batch({"text": ROWS})
