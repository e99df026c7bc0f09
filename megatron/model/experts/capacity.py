"""Which tokens an expert takes where it takes at most so many of a sequence.

A capacity of each rank's tokens, as others have it, drops other tokens for every split of a batch
(64 tokens, 8 experts, 2 taken, factor 1: 9 choices dropped in one piece, 21 in quarters). So the
tokens that compete here are those of one sequence, wherever its parts are.
"""

import math

import torch
from torch import Tensor

from megatron.config.experts import TokenDropPolicy
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_gather
from megatron.mpu.mappings import sequence_part


def capacity_of(length: int, taken: int, experts: int, factor: float, least: int) -> int:
    """Return how many tokens of a sequence an expert takes at most.

    GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 2.2) of a group of `length` tokens:
    `factor` times what it would take if all experts were alike, rounded up, and not below `least`.
    """
    return max(least, math.ceil(length * taken / experts * factor))


def within_capacity(
    chosen: Tensor, shares: Tensor, capacity: int, policy: TokenDropPolicy, *, experts: int
) -> Tensor:
    """Return which choices are within the capacity of their expert: bool [s, b, k].

    Args:
        chosen: [s, b, k] int64, experts of whole sequences.
        shares: [s, b, k], by which an expert takes the best under `probs`; of equal ones the first
            in the sequence, as it takes all under `position`.
        experts: their number.
    """
    length, batch, taken = chosen.shape
    by_sequence = chosen.transpose(0, 1).reshape(batch, -1)  # [b, s k], in order of positions
    places = torch.arange(length * taken, device=chosen.device).expand_as(by_sequence)
    order = places
    if policy is TokenDropPolicy.PROBS:
        worth = shares.transpose(0, 1).reshape(batch, -1)
        order = worth.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, by_sequence.gather(1, order).argsort(dim=1, stable=True))
    in_order = by_sequence.gather(1, order)  # experts, each expert's best choice first
    each = torch.zeros(batch, experts, dtype=torch.int64, device=chosen.device)
    each.scatter_add_(1, by_sequence, torch.ones_like(by_sequence))
    before = each.cumsum(dim=1) - each  # choices of the experts before each
    kept = places - before.gather(1, in_order) < capacity
    kept = torch.zeros_like(kept).scatter(1, order, kept)
    return kept.view(batch, length, taken).transpose(0, 1)


class WholeSequences:
    """What ranks that share sequences, over tp and cp, hold of them, put together; and back."""

    def __init__(self, build: ModelBuild) -> None:
        self._tp = build.ctx.tp if build.sequence_parallel else None
        self._cp, self._share = build.ctx.cp, build.share

    def gather(self, part: Tensor) -> Tensor:
        """Return [s, ..] of this rank's [s / cp / tp, ..]; no gradient goes back."""
        whole = part if self._tp is None else all_gather(part, self._tp)
        if self._cp.size == 1:
            return whole
        whole = all_gather(whole, self._cp)
        positions = self._share.gathered_positions(whole.shape[0], whole.device)
        return whole.index_select(0, positions.argsort())

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's part of [s, ..]."""
        part = self._share.take(whole, 0)
        return part if self._tp is None else part[sequence_part(part.shape[0], self._tp)]
