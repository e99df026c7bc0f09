"""Attention of documents whose first tokens all see each other, block by block on a CPU.

Tokens behind such a prefix see their document up to themselves (prefix LM: Raffel et al. 2020,
arXiv 1910.10683, figure 4). A mask would make kernels compute all pairs of a row; here there are
only blocks that a kernel computes without a mask. What a reader would get wrong: where the blocks
are follows from values of tensors, so a device that computes ahead of the host is better off with
a mask.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron.ops.attention_blocks import attend_block, attend_block_gradients, merge_
from megatron.ops.library import statistics_dtype


class PrefixSpan(NamedTuple):
    """A document of one row: tokens `start` to `prefix_stop` are its prefix, the rest follows."""

    row: int
    start: int
    prefix_stop: int
    stop: int


Spans = tuple[PrefixSpan, ...]
# Measured with 4 to 16 heads of 16 to 64 channels on one core of an Intel Xeon: 11,000 to 38,000.
PAIRS_OF_A_SPAN = 32_768


def prefix_spans(document_ids: Tensor, is_prefix: Tensor) -> Spans | None:
    """Return the documents of all rows in order; reads values of both tensors [b, s].

    None where documents are not made of a prefix and the rest: a token of a prefix stands behind
    one that is not, or a document goes on behind another one.
    """
    spans: list[PrefixSpan] = []
    length = document_ids.shape[1]
    for row, (ids, marks) in enumerate(zip(document_ids.tolist(), is_prefix.tolist())):
        borders = [at for at in range(1, length) if ids[at] != ids[at - 1]]
        for start, stop in pairwise([0, *borders, length]):
            count = sum(map(bool, marks[start:stop]))
            if not all(marks[start : start + count]):
                return None
            spans.append(PrefixSpan(row, start, start + count, stop))
        if len(borders) >= len(set(ids)):
            return None
    return tuple(spans)


def are_faster_than_a_mask(spans: Spans, rows: int, length: int) -> bool:
    """Return whether blocks are estimated to take less time than all pairs of tokens of all rows.

    Pairs of blocks count, and the calls of kernels for a span as many as they take the time of.
    """
    pairs = 0
    for _, start, prefix_stop, stop in spans:
        rest = stop - prefix_stop
        pairs += (prefix_stop - start) * (stop - start) + rest * rest // 2
    return pairs + len(spans) * PAIRS_OF_A_SPAN < rows * length**2


def attend_spans(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v within documents, and causal behind prefixes: [b, a, s, d].

    Args:
        q: [b, a, s, d] queries; those of one group are neighbours.
        k: [b, g, s, d] keys, where g divides a.
        v: as `k`.
        spans: of all tokens of all rows, as `prefix_spans` returns them.
    """
    return _ATTEND_SPANS(q, k, v, spans)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    spans: Spans


class _AttendSpans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        b, heads, length, width = q.shape
        # The layout of the model, in which there is nothing to copy.
        out = q.new_empty((length, b, heads, width)).permute(1, 2, 0, 3)
        log_sums = q.new_empty((b, heads, length), dtype=statistics_dtype(q))
        for span in spans:
            prefix, rest = _slices(span)
            if span.prefix_stop > span.start:
                given = (q[prefix], k[prefix], v[prefix])
                out[prefix], log_sums[prefix] = attend_block(*given, None, causal=False)
            if span.stop > span.prefix_stop:
                part, sums = attend_block(q[rest], k[rest], v[rest], None, causal=True)
                if span.prefix_stop > span.start:
                    # Copies, for the sums of both blocks are in place.
                    part = part.to(log_sums.dtype, copy=True)
                    sums = sums.clone()
                    given = (q[rest], k[prefix], v[prefix])
                    merge_(part, sums, *attend_block(*given, None, causal=False))
                out[rest], log_sums[rest] = part, sums
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.spans = spans
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, log_sums = ctx.saved_tensors
        of_q, of_k, of_v = gradients = tuple(torch.empty_like(t) for t in (q, k, v))

        def of_block(
            rows: tuple[slice, ...], keys: tuple[slice, ...], *, causal: bool
        ) -> tuple[Tensor, ...]:
            given = (q[rows], k[keys], v[keys])
            return attend_block_gradients(
                grad[rows], given, out[rows], log_sums[rows], None, causal=causal
            )

        for span in ctx.spans:
            prefix, rest = _slices(span)
            # Queries of the rest, keys and values of the prefix: each has a sum of two blocks.
            shared: tuple[Tensor | None, ...] = (None, None, None)
            if span.prefix_stop > span.start and span.stop > span.prefix_stop:
                shared = of_block(rest, prefix, causal=False)
            if span.prefix_stop > span.start:
                parts = of_block(prefix, prefix, causal=False)
                _put(gradients, prefix, parts, (None, *shared[1:]))
            if span.stop > span.prefix_stop:
                parts = of_block(rest, rest, causal=True)
                _put(gradients, rest, parts, (shared[0], None, None))
        return of_q, of_k, of_v, None


def _slices(span: PrefixSpan) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return where the prefix and the rest are in tensors [b, a, s, ..]."""
    row, every = slice(span.row, span.row + 1), slice(None)
    return (
        (row, every, slice(span.start, span.prefix_stop)),
        (row, every, slice(span.prefix_stop, span.stop)),
    )


def _put(
    targets: tuple[Tensor, ...],
    where: tuple[slice, ...],
    parts: tuple[Tensor, ...],
    others: tuple[Tensor | None, ...],
) -> None:
    """Write sums of two parts, each rounded once, or the one where there is no other."""
    for target, part, other in zip(targets, parts, others):
        if other is not None:
            wide = statistics_dtype(part)
            part = part.to(wide) + other.to(wide)
        target[where] = part


_ATTEND_SPANS: Callable[[Tensor, Tensor, Tensor, Spans], Tensor] = _AttendSpans.apply
