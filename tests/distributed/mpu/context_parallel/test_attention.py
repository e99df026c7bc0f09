"""Attention over ranks against attention of one process: random lengths, heads and masks."""

import random
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu.collectives import Pending
from megatron.mpu.context_parallel import attention
from megatron.mpu.context_parallel.attention import AttentionOverRanks
from megatron.mpu.context_parallel.shares import SequenceShare
from tests.distributed.mpu.reference import EXACT, build, sample
from tests.support.ranks import run_on_ranks

CASES = 6


def expected(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grad: Tensor
) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def over_ranks(
    over: AttentionOverRanks, wholes: list[Tensor], mask: Tensor | None, causal: bool, grad: Tensor
) -> list[Tensor]:
    """The own parts of output and gradients."""
    leaves = [over.share.take(t, 2).clone().requires_grad_() for t in wholes]
    if mask is not None:
        length = mask.shape[-1]
        mask = over.share.take(mask, -2)[..., over.share.gathered_positions(length)]
    out = over(*leaves, mask, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, over.share.take(grad, 2))]


def attention_over_ranks_is_that_of_one_process() -> list[list[Tensor]]:
    group = build_context()
    share = SequenceShare(group.rank, group.size, paired=True)
    draw, bits = random.Random(0), []  # the same cases on all ranks
    for seed in range(CASES):
        length = share.parts * draw.randint(1, 3)
        groups, queries, causal = draw.choice((1, 2)), draw.choice((1, 3)), draw.random() < 0.6
        shapes = [(2, groups * n, length, 8) for n in (queries, 1, 1)]
        wholes = [sample(*shape, seed=7 * seed + at) for at, shape in enumerate(shapes)]
        mask = None
        if seed % 2:  # documents, of which some end within a share
            ends = torch.tensor([draw.random() < 0.3 for _ in range(2 * length)]).view(2, length)
            of = ends.cumsum(1)
            mask = (of[:, None, :, None] == of[:, None, None]) & (
                torch.ones(length, length, dtype=torch.bool).tril()
                if causal
                else torch.tensor(True)
            )
        grad = sample(*shapes[0], seed=100 + seed)
        wanted = [share.take(t, 2) for t in expected(*wholes, mask, causal, grad)]
        outputs = []
        for passes in (True, False):
            over = AttentionOverRanks(group, share, passes)
            found = over_ranks(over, wholes, mask, causal, grad)
            for one, other in zip(found, wanted):
                torch.testing.assert_close(one, other, **EXACT)
            outputs.append(found[0])
        assert torch.equal(*outputs), "blocks are added up in the same order"
        bits.append(outputs[0])
    return bits


def build_context() -> Any:
    return build(cp=torch.distributed.get_world_size()).cp


def test_attention_over_ranks_is_that_of_one_process() -> None:
    for world in (2, 4):
        run_on_ranks(world, attention_over_ranks_is_that_of_one_process)


def keys_are_read_only_when_they_have_come() -> None:
    """Messages are filled with NaN until they are waited for, and what was sent is, after."""
    group = build_context()
    share = SequenceShare(group.rank, group.size, paired=True)
    real = attention.start_shift

    class Late:
        def __init__(self, pending: Pending) -> None:
            self._tensor, self._sent = pending.wait(), pending.sent
            self._values = self._tensor.clone()
            self._tensor.fill_(torch.nan)

        def wait(self) -> Tensor:
            return self._tensor.copy_(self._values)

    wholes = [sample(1, 2, 4 * share.parts, 4, seed=at) for at in range(3)]
    grad = sample(1, 2, 4 * share.parts, 4, seed=3)
    with patch.object(attention, "start_shift", lambda *call: Late(real(*call))):
        found = over_ranks(AttentionOverRanks(group, share, True), wholes, None, True, grad)
    wanted = [share.take(t, 2) for t in expected(*wholes, None, True, grad)]
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, **EXACT)


def test_keys_are_read_only_when_they_have_come() -> None:
    run_on_ranks(2, keys_are_read_only_when_they_have_come)
