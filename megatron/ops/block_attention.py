"""Attention to keys and values in the blocks of a pool, by a kernel that reads them where they lie.

The kernel is for CPUs. Its sums do not depend on what else is in a step: a query has the same bits
whatever other sequences there are, and in whatever parts its sequence comes. What a reader would
get wrong: in a block, keys lie channel after channel, so that one load has those of many tokens.
"""

import math

import torch
from torch import Tensor

from megatron.ops import library
from megatron.ops.library import operator, shapes_of

TILE_ROWS = 32  # of queries that are computed together, at most
_DTYPES = (torch.float32, torch.bfloat16)
_MULTIPLE, _MOST_WIDTH, _MOST_BLOCK = 16, 512, 256


def has_block_attention(dtype: torch.dtype, device: torch.device, width: int, block: int) -> bool:
    """Return whether there is a kernel for heads of a width and blocks of so many tokens."""
    return (
        library.INSTRUCTION_SET is not None
        and device.type == "cpu"
        and dtype in _DTYPES
        and width % _MULTIPLE == block % _MULTIPLE == 0
        and width <= _MOST_WIDTH
        and block <= _MOST_BLOCK
    )


def block_attention(
    heads: tuple[Tensor, Tensor, Tensor],
    pool: Tensor,
    places: tuple[Tensor, Tensor, Tensor],
    *,
    window: int,
) -> Tensor:
    """Store keys and values, and return the output of all queries, [t, g/tp, n, d].

    The score of a key is q k / sqrt(d).

    Args:
        heads: queries [t, g/tp, n, d], n of a group, and their keys and values [t, g/tp, d].
        pool: [2, blocks, block, g/tp, d] blocks of keys and of values, whose inner order is that of
            the kernel.
        places: int64: slots [s] of the first s tokens, block x block size + offset; tiles [m, 6]:
            first token of a slice, its position, first row of the tile in the slice, rows, the
            number of keys that all rows see, and where the blocks of the sequence begin in the last
            tensor [..]. Row n p + i of a slice is query i of its token p.
        window: of keys that a query sees, its own included; 0: all.
    """
    out: Tensor = torch.ops.megatron.paged_attention(*heads, pool, *places, window)
    return out


@operator(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor slots, Tensor tiles,"
    " Tensor tables, int window) -> Tensor"
)
def block_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    slots: Tensor,
    tiles: Tensor,
    tables: Tensor,
    window: int,
) -> Tensor:
    """Return `block_attention`, row by row, in float64 of float64."""
    _, blocks, block, groups, width = pool.shape
    of_keys = pool[0].view(blocks, groups, width, block)
    of_values = pool[1].view(blocks, groups, block, width)
    for token, slot in enumerate(slots.tolist()):
        of_keys[slot // block, :, :, slot % block] = k[token]
        of_values[slot // block, :, slot % block] = v[token]
    wide = library.statistics_dtype(q)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for token, start, first, rows, prefix, table in tiles.tolist():
        for row in range(first, first + rows):
            position, query = start + row // q.shape[2], row % q.shape[2]
            high = max(position + 1, prefix)
            low = max(0, position - window + 1) if window else 0
            high = min(high, position + window) if window else high
            own = tables[table : table + -(-high // block)]
            k_own = of_keys[own].permute(1, 0, 3, 2).flatten(1, 2)[:, low:high].to(wide)
            v_own = of_values[own].permute(1, 0, 2, 3).flatten(1, 2)[:, low:high].to(wide)
            at = token + row // q.shape[2]
            scores = (k_own @ q[at, :, query].to(wide).unsqueeze(-1)) / math.sqrt(width)
            shares = torch.softmax(scores, dim=1)
            out[at, :, query] = (shares * v_own).sum(dim=1).to(q.dtype)
    return out


@shapes_of("paged_attention")
def _shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    slots: Tensor,
    tiles: Tensor,
    tables: Tensor,
    window: int,
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
