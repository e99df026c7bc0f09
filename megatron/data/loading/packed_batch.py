"""Converts a micro-batch of packed rows to the inputs of a model and its loss.

What a reader would get wrong: padding is identified by its segment id and never by its token, so a
pad token that also ends documents is still learned; and the last token of a document predicts
nothing, because another document follows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.data.samples.packing import PADDING


class PackedBatch(NamedTuple):
    """Inputs and targets of one micro-batch, batch-first; the first five are those of GPTBatch."""

    tokens: Tensor  # int64 [b, s]
    labels: Tensor  # int64 [b, s], the token after each token
    loss_mask: Tensor  # float32 [b, s], 1 where the label is to be predicted
    position_ids: Tensor  # int64 [b, s]
    document_ids: Tensor  # int64 [b, s]; a token sees only tokens of equal id; 0 is padding
    is_prefix: Tensor | None  # bool [b, s]; all tokens of a document see these; None: causal


def packed_batch(
    text: Tensor,
    segment_ids: Tensor,
    is_input: Tensor,
    *,
    prefix_lm: bool = False,
    reset_position_ids: bool = True,
) -> PackedBatch:
    """Cut rows, int64 [b, s + 1] each, into tokens and labels; see `PackedDataset` for the three.

    A label counts where it is a target of the document that its token is in. With `prefix_lm` the
    inputs of a document are marked as seen by the whole document (as in T0, arXiv 2110.08207).
    """
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    segments, next_segments = segment_ids[:, :-1], segment_ids[:, 1:]
    counts = (next_segments != PADDING) & (segments == next_segments) & (is_input[:, 1:] == 0)
    positions = torch.arange(tokens.shape[1], device=text.device).expand(tokens.shape)
    if reset_position_ids:
        positions = positions - _starts(segments, positions)
    is_prefix = ((is_input[:, :-1] != 0) & (segments != PADDING)) if prefix_lm else None
    return PackedBatch(
        tokens,
        labels,
        counts.to(torch.float32),
        positions.contiguous(),
        segments.contiguous(),
        is_prefix,
    )


def span_corruption_batch(
    input_tokens: Tensor, target_tokens: Tensor, *, prefix_lm: bool = True
) -> PackedBatch:
    """Return `MLMDataset` rows, [b, inputs] and [b, targets + 1], joined for a decoder.

    Only targets count in the loss; each row is one document.
    """
    text = torch.cat([input_tokens, target_tokens], dim=1)
    is_input = torch.zeros_like(text)
    is_input[:, : input_tokens.shape[1]] = 1
    return packed_batch(text, torch.ones_like(text), is_input, prefix_lm=prefix_lm)


def _starts(segment_ids: Tensor, positions: Tensor) -> Tensor:
    """Return the position at which the segment of each token starts, by a running maximum."""
    starts = torch.zeros_like(positions)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts[:, 1:] = torch.where(changes, positions[:, 1:], 0)
    return starts.cummax(dim=1).values
