"""Converts a micro-batch of masked segments to the inputs of a BERT and its losses."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from megatron.data.loading.columns import columns


class BertBatch(NamedTuple):
    """Inputs and targets of one micro-batch, batch-first, int64."""

    tokens: Tensor  # [b, s]
    types: Tensor  # [b, s], 0 in the first segment and in padding, 1 in the second
    padding_mask: Tensor  # [b, s], 1 for tokens, 0 for padding
    labels: Tensor  # [b, s], the tokens to predict, else -1
    loss_mask: Tensor  # [b, s], 1 where a token is to be predicted
    swapped: Tensor  # [b], 1 where the second segment comes first


def bert_batch(raw: Mapping[str, Tensor]) -> BertBatch:
    """Return the same by the names of `BERTDataset`'s samples."""
    return BertBatch(
        *columns(raw, "text", "types", "padding_mask", "labels", "loss_mask", "is_random")
    )
