"""Attention over blocks is the formula over each sequence's own keys, whatever its layout."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import PositionEmbedding
from megatron.inference.attention_plan import KEY_MULTIPLE, attention_groups
from megatron.inference.paged_attention import PagedAttention
from megatron.inference.paged_cache import PagedCache
from megatron.model.geometry import AttentionGeometry, CachedHeads
from megatron.scheduling.forward_plan import SequenceSlice
from tests.support.models import tiny_build, tiny_config

GROUPS, EACH, WIDTH, BLOCK = 2, 2, 4, 4
# float64: the order of additions.
CLOSE = 1e-12


class Sequences:
    """Random queries, keys and values of whole sequences, and their attention token by token."""

    def __init__(self, *lengths: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (GROUPS, EACH + 2, WIDTH)
        self.heads = [
            torch.randn((length, *shape), generator=generator, dtype=torch.float64)
            for length in lengths
        ]

    def part(self, name: int, start: int, end: int) -> CachedHeads:
        """Return what a layer would compute of some tokens."""
        found = self.heads[name][start:end]
        return CachedHeads(found[:, :, :EACH], found[:, :, EACH], found[:, :, EACH + 1])

    def expected(
        self, name: int, at: int, *, window: int | None, cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Return the output [g, n, d] of the token at a position."""
        first = 0 if window is None else max(0, at + 1 - window)
        seen = self.part(name, first, at + 1)
        query = self.part(name, at, at + 1).queries[0]
        scores = torch.einsum("gnd,kgd->gnk", query, seen.keys) / math.sqrt(WIDTH)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(GROUPS, EACH, 1)], dim=2)
        shares = scores.softmax(dim=2)[..., : len(seen.keys)]
        return torch.einsum("gnk,kgd->gnd", shares, seen.values)


def joined(parts: list[CachedHeads], sinks: Tensor | None, padding: int) -> CachedHeads:
    """Return the heads of a step, with some tokens of padding at its end."""

    def cat(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([*tensors, torch.ones_like(tensors[0][:1]).repeat_interleave(padding, 0)])

    return CachedHeads(cat("queries"), cat("keys"), cat("values"), sinks)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -0.4, 1.0, 0.1], dtype=torch.float64)])
@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("window", [None, 3])
def test_outputs_are_the_formula_for_tokens_and_for_longer_slices(
    window: int | None, cap: float | None, sinks: Tensor | None
) -> None:
    config: dict[str, Any] = {"position_embedding_type": PositionEmbedding.NONE}
    config |= {"num_query_groups": GROUPS, "sliding_window": window}
    geometry = AttentionGeometry(tiny_config(**config), tiny_build())
    cache = PagedCache(
        layers=1, blocks=12, groups=GROUPS, head_width=WIDTH, dtype=torch.float64,
        device=torch.device("cpu"), block_size=BLOCK,
    )  # fmt: skip
    cache.pool[:, :, : cache.null_block] = 3.0  # left by other sequences
    sequences = Sequences(11, 6, 9)
    tables = [(7, 2, 5), (0, 11), (4, 1, 3)]
    done = [0, 0, 0]
    for step in ({0: 7, 1: 5}, {0: 1, 1: 1, 2: 6}, {2: 1, 0: 3}, {2: 1}):
        slices = [
            SequenceSlice(name, (0,) * count, done[name], tables[name], True)
            for name, count in step.items()
        ]
        groups = attention_groups(slices, block_size=BLOCK, key_multiple=KEY_MULTIPLE)
        order = [slices[at] for group in groups for at in group.slices]
        positions = [at for each in order for at in range(each.start, each.end)]
        padding = -len(positions) % 4
        attention = PagedAttention(
            cache,
            geometry,
            slices,
            groups,
            torch.tensor(positions + [0] * padding),
            row_multiple=4,
            each=EACH,
        )
        parts = [sequences.part(each.sequence, each.start, each.end) for each in order]
        heads = joined(parts, sinks, padding)
        found = attention.attend(0, heads, is_wide=False, soft_cap=cap)
        assert not found[len(positions) :].any()
        expected = [
            sequences.expected(each.sequence, at, window=window, cap=cap, sinks=sinks)
            for each in order
            for at in range(each.start, each.end)
        ]
        torch.testing.assert_close(
            found[: len(positions)], torch.stack(expected), rtol=CLOSE, atol=CLOSE
        )
        for name, count in step.items():
            done[name] += count
    assert not cache.pool[:, :, cache.null_block].any()
