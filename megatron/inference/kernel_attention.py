"""Attention of a step by the kernel that reads keys and values in the blocks where they lie."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.inference.paged_cache import PagedCache
from megatron.model.geometry import CachedHeads
from megatron.ops.block_attention import TILE_ROWS, block_attention, has_block_attention
from megatron.scheduling.forward_plan import SequenceSlice


def kernel_serves(config: ModelConfig, cache: PagedCache) -> bool:
    """Return whether the kernel computes all layers of a model: it knows windows and prefixes."""
    return (
        config.position_embedding_type is not PositionEmbedding.ALIBI
        and config.attention_soft_cap is None
        and not config.has_sinks
        and has_block_attention(
            cache.pool.dtype, cache.pool.device, config.head_width, cache.block_size
        )
    )


class KernelAttention:
    """The `CachedAttention` of one step; tokens stand in the order of slices.

    Args:
        each: query heads of a group.
        window: of layers that are not wide; None: they have none.
    """

    def __init__(
        self, cache: PagedCache, slices: Sequence[SequenceSlice], *, each: int, window: int | None
    ) -> None:
        self._cache, self._window = cache, window or 0
        tiles: list[tuple[int, ...]] = []
        tables: list[int] = []
        token = 0
        for own in slices:
            rows = len(own.tokens) * each
            prefix = own.prefix if len(own.tokens) > 1 else 0
            for first in range(0, rows, TILE_ROWS):
                count = min(TILE_ROWS, rows - first)
                tiles.append((token, own.start, first, count, prefix, len(tables)))
            tables += own.blocks
            token += len(own.tokens)
        slots = cache.slots(slices)
        self._places = (torch.tensor(slots), torch.tensor(tiles), torch.tensor(tables))

    def attend(
        self, layer: int, heads: CachedHeads, *, is_wide: bool, soft_cap: float | None
    ) -> Tensor:
        """Store keys and values of all tokens, and return the output of their queries.

        Arguments and result are those of `CachedAttention`; the output of padding is zeros.
        """
        return block_attention(
            (heads.queries, heads.keys, heads.values),
            self._cache.layer(layer),
            self._places,
            window=0 if is_wide else self._window,
        )
