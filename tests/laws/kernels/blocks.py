"""Attention to keys and values in blocks as the law of kernels sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron.ops.block_attention import TILE_ROWS, block_attention_reference

DTYPES = (torch.float32, torch.bfloat16)
KERNEL = torch.ops.megatron.paged_attention.default


@dataclass(frozen=True)
class Case:
    """Sequences of some lengths, and how their tokens are shared out to steps.

    Attributes:
        parts: tokens of each sequence by step.
        sharpness: what queries are multiplied by.
    """

    parts: tuple[tuple[int, ...], ...]
    groups: int = 2
    queries: int = 2
    width: int = 16
    block: int = 16
    window: int = 0
    prefix: int = 0
    sharpness: float = 1.0

    def heads(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the heads [t, g, n + 2, d] of each sequence: queries, key and value."""
        random = torch.Generator().manual_seed(len(self.parts))
        shape = (self.groups, self.queries + 2, self.width)
        made = [torch.randn((sum(parts), *shape), generator=random) for parts in self.parts]
        for each in made:
            each[:, :, : self.queries] *= self.sharpness
        return [each.to(dtype) for each in made]


CASES = (
    Case(((1,),)),
    Case(((5, 1, 1), (1, 1)), groups=1, queries=1),
    Case(((17, 1, 30), (40, 1, 1), (3,)), queries=4, width=48),
    Case(((64, 1, 1), (2, 9, 1)), block=32, width=64, window=19),
    Case(((33,), (70, 1)), queries=3, window=16, width=80),
    Case(((40, 1, 1), (7, 1)), prefix=7, queries=8),
    Case(((40, 1, 1), (7, 1)), prefix=7, window=5),
    Case(((90, 1, 1), (2, 9, 1)), sharpness=30.0, width=32),
)


def run(
    case: Case,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor],
    *,
    steps: bool = True,
    rounded_to: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the outputs [t, g, n, d] of all tokens of each sequence.

    Args:
        steps: all sequences part by part; else each one alone and at once.
        rounded_to: what operands are numbers of; None: `dtype`.
    """
    heads = [each.to(dtype) for each in case.heads(rounded_to or dtype)]
    lengths = [len(each) for each in heads]
    counts = [-(-length // case.block) for length in lengths]
    blocks = sum(counts) + 1
    pool = torch.zeros(2, blocks, case.block, case.groups, case.width, dtype=dtype)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[at : at + n] for at, n in zip([0, *torch.tensor(counts).cumsum(0)], counts)]
    outs: list[list[Tensor]] = [[] for _ in heads]
    if steps:
        most = max(map(len, case.parts))
        passes = [[(name, at) for name in range(len(heads))] for at in range(most)]
        passes = [[(n, at) for n, at in each if at < len(case.parts[n])] for each in passes]
    else:
        passes = [[(name, -1)] for name in range(len(heads))]
    for members in passes:
        slots, tiles, own_tables, tokens, spans = [], [], [], [], []
        for name, at in members:
            bounds = [0, *torch.tensor(case.parts[name]).cumsum(0).tolist()]
            start, end = (0, lengths[name]) if at < 0 else list(pairwise(bounds))[at]
            rows = (end - start) * case.queries
            first_token = sum(len(t) for t in tokens)
            for first in range(0, rows, TILE_ROWS):
                count = min(TILE_ROWS, rows - first)
                seen = case.prefix if start == 0 else 0
                tiles.append((first_token, start, first, count, min(seen, end), len(own_tables)))
            own_tables += tables[name]
            slots += [tables[name][p // case.block] * case.block + p % case.block
                      for p in range(start, end)]  # fmt: skip
            tokens.append(heads[name][start:end])
            spans.append((name, end - start))
        step = torch.cat([*tokens, torch.ones_like(heads[0][:1])])  # one token of padding
        n = case.queries
        given = (step[:, :, :n], step[:, :, n], step[:, :, n + 1], pool)
        places = [torch.tensor(each) for each in (slots, tiles, own_tables)]
        out = kernel(*given, *places, case.window)
        assert not out[-1].any()
        for (name, _), part in zip(spans, out.split([*[count for _, count in spans], 1])):
            outs[name].append(part)
    return [torch.cat(parts) for parts in outs]


def check(case: Case, dtype: torch.dtype, *, kernel: Callable[..., Tensor] = KERNEL) -> None:
    """Check outputs against those of the reference in fp64, which takes the same numbers."""
    expected = run(case, torch.float64, block_attention_reference, rounded_to=dtype)
    # A score is a sum of d products in fp32, whose error grows with it; values are 5 at the most.
    bound = 8 * case.width * max(1.0, case.sharpness) * torch.finfo(torch.float32).eps
    for found, wide in zip(run(case, dtype, kernel), expected, strict=True):
        error = (found.double() - wide).abs()
        rounded = torch.finfo(dtype).eps / 2 * wide.abs()
        assert (error <= bound + rounded).all(), f"{error.max():.3g}"


def check_bits(case: Case, dtype: torch.dtype) -> None:
    """Check that outputs have the same bits in parts beside others, and at once alone."""
    if case.prefix:
        return  # what is seen of a prefix depends on its parts
    for one, other in zip(run(case, dtype, KERNEL), run(case, dtype, KERNEL, steps=False)):
        assert torch.equal(one, other)


def check_some() -> None:
    """Check all cases in every dtype."""
    for dtype in DTYPES:
        for case in CASES:
            check(case, dtype)
            check_bits(case, dtype)
