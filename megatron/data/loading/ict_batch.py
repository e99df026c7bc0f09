"""Converts a micro-batch of questions and blocks to the inputs of both towers."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from megatron.data.loading.columns import columns


class ICTBatch(NamedTuple):
    """Inputs of one micro-batch, batch-first, int64."""

    questions: Tensor  # [b, s]
    question_mask: Tensor  # [b, s], 1 for tokens, 0 for padding
    blocks: Tensor  # [b, s]
    block_mask: Tensor  # [b, s]
    block_data: Tensor  # [b, 4]: first sentence, end, document of the corpus, number of the block


def ict_batch(raw: Mapping[str, Tensor]) -> ICTBatch:
    """Return the same by the names of `ICTDataset`'s samples."""
    return ICTBatch(
        *columns(
            raw,
            "query_tokens",
            "query_pad_mask",
            "context_tokens",
            "context_pad_mask",
            "block_data",
        )
    )
