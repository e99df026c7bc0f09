"""Converts a micro-batch of the kinds of data of a prefix LM to the inputs of its model and loss.

What a reader would get wrong: the last token of a prefix predicts a target, so it counts, and the
first token of a prefix is no target of what stands before it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.data.kinds.dataset_kind import DatasetKind, prefix_dataset_kind
from megatron.data.loading.columns import columns
from megatron.data.loading.gpt_batch import gpt_batch
from megatron.data.loading.packed_batch import PackedBatch, packed_batch, span_corruption_batch


def prefix_lm_batch(raw: Mapping[str, Tensor], data: DataConfig, *, eod: int | None) -> PackedBatch:
    """Return a prefix LM's input from a raw batch of the dataset kind that flags choose.

    The inputs of pairs and texts that have lost spans are prefixes. In windows of text a row is one
    document, unless --reset-attention-mask separates those in it.
    """
    kind = prefix_dataset_kind(data)
    if kind.is_packed:
        rows = columns(raw, "text", "segment_ids", "is_input")
        return packed_batch(*rows, prefix_lm=True)
    if kind is DatasetKind.MLM:
        return span_corruption_batch(*columns(raw, "input_tokens", "target_tokens"))
    text, is_prefix = columns(raw, "text", "is_prefix")
    cut = gpt_batch(
        text,
        eod=eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
    )
    weights = cut.loss_mask
    if data.loss_on_targets_only:
        weights = weights * (is_prefix[:, 1:] == 0)
    if data.reweight_loss_based_on_position_frequency:
        weights = weights * position_weights(text.shape[1] - 1, text.device)
    documents = torch.zeros_like(cut.tokens) if cut.document_ids is None else cut.document_ids
    return PackedBatch(
        cut.tokens,
        cut.labels,
        weights,
        cut.position_ids,
        documents,
        (is_prefix[:, :-1] != 0).contiguous(),
    )


def position_weights(length: int, device: torch.device | None = None) -> Tensor:
    """Return the weight of each position in the loss, float32 [length]: 1 on average.

    As in Megatron-DeepSpeed, 2 (s - t) / (s + 1) for position t of s. Behind prefixes of uniform
    length late positions are targets more often than early ones.
    """
    falling = torch.arange(length, 0, -1, dtype=torch.float32, device=device)
    return falling * (2 / (length + 1))
