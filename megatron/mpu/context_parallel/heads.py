"""Exchange of tokens for heads: every rank gets some heads of all tokens, and back.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509, section 3.1). Between the two exchanges
attention is that of one process, for fewer heads.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import all_to_all
from megatron.mpu.context import Group


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of this rank, of all tokens, in one exchange.

    Args:
        q: [b, a, s/cp, d], where cp divides a; the result is [b, a/cp, s, d].
        k: [b, g, s/cp, d], where g divides a. Where cp does not divide g, heads of keys are sent
            to several ranks; the result is [b, g'/cp, s, d], with g' the least sufficient number.
        v: as `k`.
    """
    copies = copies_of_keys(q.shape[1], k.shape[1], group.size)
    k, v = (t.repeat_interleave(copies, 1) if copies > 1 else t for t in (k, v))
    # The heads for one rank stand together: those of q, of k, and of v.
    parts = [torch.unflatten(t, 1, (group.size, -1)) for t in (q, k, v)]
    sizes = [part.shape[2] for part in parts]
    met = _EXCHANGE(torch.cat(parts, dim=2), group, True)
    one, two, three = torch.split(met, sizes, dim=1)
    return one, two, three


def heads_to_tokens(context: Tensor, group: Group) -> Tensor:
    """Return all heads of this rank's tokens: [b, a/cp, s, d] to [b, a, s/cp, d]."""
    return _EXCHANGE(context, group, False).flatten(1, 2)


def copies_of_keys(heads: int, groups: int, ranks: int) -> int:
    """Return how often heads of keys are repeated so that `ranks` divides them; it divides `heads`.

    Each copy still serves neighbouring queries, for the result divides heads / groups.
    """
    copies = ranks // math.gcd(groups, ranks)
    queries = heads // groups
    return next(n for n in range(copies, queries + 1, copies) if queries % n == 0)


class _Context(FunctionContext):
    group: Group
    leave: bool


class _Exchange(torch.autograd.Function):
    """[b, cp, n, s/cp, d] to [b, n, s, d] (`leave`), or back; each is the other's gradient."""

    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Group, leave: bool) -> Tensor:
        ctx.group, ctx.leave = group, leave
        return _exchange(tensor, group, leave=leave)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, ctx.group, leave=not ctx.leave), None, None


def _exchange(tensor: Tensor, group: Group, *, leave: bool) -> Tensor:
    if leave:
        by_rank = tensor.permute(1, 3, 0, 2, 4)  # [cp, s/cp, b, n, d]
        return all_to_all(by_rank, group).flatten(0, 1).permute(1, 2, 0, 3)
    by_rank = torch.unflatten(
        tensor.permute(2, 0, 1, 3), 0, (group.size, -1)
    )  # [cp, s/cp, b, n, d]
    return all_to_all(by_rank, group).permute(2, 0, 3, 1, 4)


_EXCHANGE: Callable[[Tensor, Group, bool], Tensor] = _Exchange.apply
