"""What the loader yields of a T5 becomes rows of its encoder and of its decoder."""

from typing import NamedTuple

import pytest
import torch

from megatron.data.loading.t5_batch import decoder_start, t5_batch
from megatron.errors import ConfigError, DataError


class Marks(NamedTuple):
    bos: int | None = None
    pad: int | None = None
    eod: int | None = None


def test_every_tensor_of_a_masked_text_goes_where_its_name_says() -> None:
    names = ("text_enc", "padding_mask", "text_dec", "labels", "loss_mask")
    raw = {name: torch.tensor([at]) for at, name in enumerate((*names, "truncated"))}
    made = t5_batch(raw, Marks(), decoder_length=9)
    assert [int(tensor) for tensor in made] == [0, 1, 2, 3, 4]
    assert made._fields == ("tokens", "padding_mask", "decoder_tokens", "labels", "loss_mask")


def test_targets_of_spans_are_read_one_token_later_and_filled_up() -> None:
    raw = {
        "input_tokens": torch.tensor([[5, 6, 7, 8]]),
        "target_tokens": torch.tensor([[11, 12, 13]]),
    }
    made = t5_batch(raw, Marks(pad=3), decoder_length=5)
    assert made.tokens.tolist() == [[5, 6, 7, 8]]
    assert made.padding_mask.tolist() == [[1, 1, 1, 1]]
    assert made.decoder_tokens.tolist() == [[3, 11, 12, 3, 3]]
    assert made.labels.tolist() == [[11, 12, 13, -1, -1]]
    assert made.loss_mask.tolist() == [[1, 1, 1, 0, 0]]
    exact = t5_batch(raw, Marks(pad=3), decoder_length=3)
    assert exact.labels.tolist() == [[11, 12, 13]]


def test_a_decoder_begins_with_the_first_mark_that_there_is() -> None:
    assert decoder_start(Marks(bos=1, pad=0, eod=2)) == 1
    assert decoder_start(Marks(pad=0, eod=2)) == 0
    assert decoder_start(Marks(eod=2)) == 2
    with pytest.raises(ConfigError, match="lacks a token that a decoder could begin with"):
        decoder_start(Marks())


def test_a_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="a batch lacks tensors that the model takes"):
        t5_batch({"text": torch.zeros(1, 3)}, Marks(pad=0), decoder_length=3)
