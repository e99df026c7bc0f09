"""Converts a micro-batch of either kind of a T5's data to the inputs of its model and its loss.

What a reader would get wrong: windows that have lost spans have rows of fixed lengths and nothing
that marks their beginning, so the decoder's first token is put before them here.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.loading.columns import columns
from megatron.errors import ConfigError


class Marks(Protocol):
    """The tokens of a vocabulary that may begin a text."""

    @property
    def bos(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    @property
    def eod(self) -> int | None: ...


class T5Batch(NamedTuple):
    """Inputs and targets of one micro-batch, batch-first, int64."""

    tokens: Tensor  # [b, s]
    padding_mask: Tensor  # [b, s], 1 for tokens, 0 for padding
    decoder_tokens: Tensor  # [b, d]
    labels: Tensor  # [b, d], -1 in padding
    loss_mask: Tensor  # [b, d], 1 for tokens, 0 for padding


def decoder_start(tokenizer: Marks) -> int:
    """Return the first token of a decoder: bos, else padding as in T5's own vocabulary, else eod.

    Raises:
        ConfigError: the tokenizer has none of them.
    """
    found = [mark for mark in (tokenizer.bos, tokenizer.pad, tokenizer.eod) if mark is not None]
    if not found:
        raise ConfigError(
            "the tokenizer lacks a token that a decoder could begin with",
            found="no bos, no padding and no end of document",
            fix="use a tokenizer with one of them, such as --tokenizer-type HFTokenizer of a T5",
        )
    return found[0]


def t5_batch(raw: Mapping[str, Tensor], tokenizer: Marks, *, decoder_length: int) -> T5Batch:
    """Return the batch of samples of `T5Dataset` or of `MLMDataset`.

    Args:
        decoder_length: tokens of a row of the decoder, no fewer than those of its targets.
    """
    if "text_enc" in raw:
        return T5Batch(*columns(raw, "text_enc", "padding_mask", "text_dec", "labels", "loss_mask"))
    tokens, targets = columns(raw, "input_tokens", "target_tokens")
    start = decoder_start(tokenizer)
    first = torch.full_like(targets[:, :1], start)
    room = (0, decoder_length - targets.shape[1])
    return T5Batch(
        tokens,
        torch.ones_like(tokens),
        F.pad(torch.cat([first, targets[:, :-1]], dim=1), room, value=start),
        F.pad(targets, room, value=-1),
        F.pad(torch.ones_like(targets), room),
    )
