"""Attention of a rank's own queries to the keys of all ranks that share the sequence.

Either keys and values pass round the ring of ranks while each computes with those it has, or every
rank gathers all of them. Both add up the same blocks in the same order, so that they give the same
bits in forward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import Pending, all_gather, reduce_scatter, ring, start_shift
from megatron.mpu.context import Group
from megatron.mpu.context_parallel.shares import KeyBlock, SequenceShare, key_blocks
from megatron.ops.attention_blocks import (
    add_sinks_,
    attend_block,
    attend_block_gradients,
    merge_,
    sink_gradients,
)


@dataclass(frozen=True, slots=True)
class AttentionOverRanks:
    """softmax(q k^T / sqrt(d)) v with the keys of all ranks of `group`, which may be one.

    Args:
        share: which tokens this rank holds.
        passes: keys go round the ranks, two ranks' at a time in memory; else all are gathered.
    """

    group: Group
    share: SequenceShare
    passes: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the own queries, [b, a, s/cp, d]; every rank has to call it.

        Args:
            q: [b, a, s/cp, d].
            k: [b, g, s/cp, d], where g divides a; v alike.
            mask: None, or [.., s/cp, s] with the keys in the order of ranks; complete, with what
                `causal` hides. Every query sees its own key.
            causal: no query sees a later key.
            sinks: [a] scores beside those of the keys, whose share of a row goes nowhere.
        """
        return _OVER_RANKS(q, k, v, sinks, mask, causal, self)


class _Context(FunctionContext):
    causal: bool
    over: AttentionOverRanks


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        over: AttentionOverRanks,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        total = sums = q.new_empty(0)
        for block, (keys, values) in _met(over, torch.stack([k, v]), causal=causal):
            rows, columns = block.queries, block.keys
            part, part_sums = attend_block(
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                _mask_of(block, mask, q.shape[2]),
                causal=block.causal and mask is None,
            )
            if block.source == over.share.rank:
                # The first: a copy, for the sums of further blocks are in place.
                total, sums = part.to(wide, copy=True), part_sums.to(wide, copy=True)
            else:
                merge_(total[:, :, rows], sums[:, :, rows], part, part_sums)
        if sinks is not None:
            add_sinks_(total, sums, sinks)
        out = total.to(q.dtype)
        ctx.causal, ctx.over = causal, over
        ctx.save_for_backward(q, k, v, sinks, out, sums, mask)  # type: ignore[arg-type]  # takes None
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None, None]:
        q, k, v, sinks, out, sums, mask = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros_like(q, dtype=wide)
        of_keys = _KeyGradients(ctx.over, k)
        for block, (keys, values) in _met(ctx.over, torch.stack([k, v]), causal=ctx.causal):
            rows, columns = block.queries, block.keys
            of_q, *parts = attend_block_gradients(
                grad[:, :, rows],
                (q[:, :, rows], keys[:, :, columns], values[:, :, columns]),
                out[:, :, rows],
                sums[:, :, rows],
                _mask_of(block, mask, q.shape[2]),
                causal=block.causal and mask is None,
            )
            grad_q[:, :, rows] += of_q
            of_keys.add(block, parts)
        grad_k, grad_v = (total.to(k.dtype) for total in of_keys.own())
        of_sinks = None if sinks is None else sink_gradients(grad, out, sums, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, of_sinks, None, None, None


class _KeyGradients:
    """Sums of the gradients of keys and values over the ranks that saw them, in fp32 or wider.

    Where keys pass round, their sums follow one step behind, and arrive where they belong.
    """

    def __init__(self, over: AttentionOverRanks, keys: Tensor) -> None:
        self._over = over
        ranks = () if over.passes else (over.group.size,)
        wide = torch.promote_types(keys.dtype, torch.float32)
        self._sums = torch.zeros((*ranks, 2, *keys.shape), dtype=wide, device=keys.device)
        self._coming: Pending | None = None

    def add(self, block: KeyBlock, parts: Sequence[Tensor]) -> None:
        """Add the gradients of the keys and of the values of one block."""
        sums = self._arrived() if self._over.passes else self._sums[block.source]
        for total, part in zip(sums, parts):
            total[:, :, block.keys] += part
        if self._over.passes:
            self._coming = start_shift(sums, self._over.group)

    def own(self) -> Tensor:
        """Return the sums of this rank's keys and values, [2, b, g, s/cp, d]."""
        if self._over.passes:
            return self._arrived()
        return reduce_scatter(self._sums, self._over.group)[0]

    def _arrived(self) -> Tensor:
        return self._sums if self._coming is None else self._coming.wait()


def _met(
    over: AttentionOverRanks, own: Tensor, *, causal: bool
) -> Iterator[tuple[KeyBlock, Tensor]]:
    """Yield the blocks of this rank, each with keys and values [2, b, g, s/cp, d] of its source.

    The next ones are on their way while the caller computes.
    """
    group = over.group
    if not over.passes:
        whole = all_gather(own.unsqueeze(0), group)
        for block in key_blocks(over.share, own.shape[3], causal=causal):
            yield block, whole[block.source]
        return
    yield from zip(key_blocks(over.share, own.shape[3], causal=causal), ring(own, group))


def _mask_of(block: KeyBlock, mask: Tensor | None, tokens: int) -> Tensor | None:
    """Return the rows and columns of a mask that belong to a block, with four dimensions."""
    if mask is None:
        return None
    first = block.source * tokens
    columns = slice(first + block.keys.start, first + block.keys.stop)
    part = mask[..., block.queries, columns]
    return part.reshape(*(1,) * (4 - part.dim()), *part.shape)


_OVER_RANKS: Callable[..., Tensor] = _OverRanks.apply
