"""Converts a micro-batch of any kind of dataset to the inputs of a GPT model and its loss.

What a reader would get wrong: the end-of-document token belongs to the document that it ends; the
next token is the first of the next document, at position 0 when positions are reset.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.data.kinds.dataset_kind import DatasetKind, dataset_kind
from megatron.data.loading.columns import columns
from megatron.data.loading.packed_batch import packed_batch, span_corruption_batch
from megatron.errors import ConfigError


class GPTBatch(NamedTuple):
    """Inputs and targets of one micro-batch, batch-first."""

    tokens: Tensor  # int64 [b, s]
    labels: Tensor  # int64 [b, s], the token after each token
    loss_mask: Tensor  # float32 [b, s], 1 where the prediction counts
    position_ids: Tensor  # int64 [b, s]
    document_ids: Tensor | None  # int64 [b, s]; a token sees only tokens of equal id; None: all


def decoder_batch(raw: Mapping[str, Tensor], data: DataConfig, *, eod: int | None) -> GPTBatch:
    """Return a causal decoder's input from a raw batch of the dataset kind that flags choose.

    In rows of dialogues and pairs, positions restart at each of them, and attention stays within
    it.
    """
    kind = dataset_kind(data)
    if kind.is_packed:
        packed = packed_batch(*columns(raw, "text", "segment_ids", "is_input"))
        return GPTBatch(*packed[:5])
    if kind is DatasetKind.MLM:
        # Each row is one document, so no documents need to be separated.
        rows = columns(raw, "input_tokens", "target_tokens")
        spans = span_corruption_batch(*rows, prefix_lm=False)
        return GPTBatch(*spans[:4], document_ids=None)
    return gpt_batch(
        *columns(raw, "text"),
        eod=eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )


def truncate_batch(raw: Mapping[str, Tensor], length: int) -> Mapping[str, Tensor]:
    """Return the first `length` tokens of each row and the last one's label, for a curriculum.

    For kinds of which every tensor is [b, s + 1] (`DatasetKind.can_be_cut`). The rest of a row is
    its beginning, so attention and positions do not change.
    """
    return {name: rows[:, : length + 1] for name, rows in raw.items()}


def gpt_batch(
    text: Tensor,
    *,
    eod: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> GPTBatch:
    """Cut `text`, int64 [b, s + 1], into tokens and labels and mark the documents in it."""
    if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        flags = {
            "--reset-position-ids": reset_position_ids,
            "--reset-attention-mask": reset_attention_mask,
            "--eod-mask-loss": eod_mask_loss,
        }
        raise ConfigError(
            "the end of a document cannot be found without an end-of-document token",
            found=f"{', '.join(flag for flag, on in flags.items() if on)}; the tokenizer has none",
            fix="use a tokenizer with an end-of-document token, or leave those flags out",
        )
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    is_eod = torch.zeros_like(tokens, dtype=torch.bool) if eod is None else tokens == eod
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
    if eod_mask_loss:
        loss_mask.masked_fill_(is_eod, 0.0)
    return GPTBatch(
        tokens,
        labels,
        loss_mask,
        _position_ids(is_eod, reset_position_ids),
        _document_ids(is_eod) if reset_attention_mask else None,
    )


def _position_ids(is_eod: Tensor, reset: bool) -> Tensor:
    positions = torch.arange(is_eod.shape[1], device=is_eod.device).expand(is_eod.shape)
    if not reset:
        return positions.contiguous()
    # A document starts after an end-of-document token; the last start so far is a running maximum.
    starts = torch.zeros_like(positions)
    starts[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)
    return positions - starts.cummax(dim=1).values


def _document_ids(is_eod: Tensor) -> Tensor:
    ends_so_far = is_eod.long().cumsum(dim=1)
    return ends_so_far - is_eod.long()
