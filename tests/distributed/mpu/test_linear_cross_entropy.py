"""Tests of the projection and cross entropy as one operation, over tensor-parallel ranks."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import linear_cross_entropy as module
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState, linear_cross_entropy
from megatron.mpu.mappings import sequence_part
from tests.distributed.mpu.reference import EXACT, build, sample
from tests.support.ranks import run_on_ranks

PADDED, TRUE, HIDDEN = 16, 13, 6


FACTOR = torch.tensor(0.3, dtype=torch.float64)


def check_whole_vocabulary(
    ctx: ParallelContext, true: int, *, split: bool, known: bool, z_loss_coeff: float
) -> None:
    """Compare with torch's operations on one rank.

    Args:
        split: under sequence parallelism.
        known: the factor of the loss is announced.
    """
    tp = ctx.tp.size
    whole = [sample(8, 2, HIDDEN, seed=1), sample(PADDED, HIDDEN, seed=2)]
    hidden, weight = (one.requires_grad_() for one in whole)
    labels = torch.arange(16).view(8, 2) % true
    labels[0, 0] = -1  # nothing to predict here
    token_weights = sample(8, 2, seed=3).abs()
    logits = F.linear(hidden, weight)[..., :true].flatten(0, 1)
    losses = F.cross_entropy(
        logits,
        labels.flatten(),
        reduction="none",
        ignore_index=-1,
    )
    expected = (losses * token_weights.flatten()).sum()
    counted = token_weights.flatten() * (labels.flatten() >= 0)
    squares = (torch.logsumexp(logits, dim=-1).square() * counted).sum()
    (FACTOR * (expected + z_loss_coeff * squares)).backward()

    part = sequence_part(8, ctx.tp) if split else slice(None)
    own_hidden = hidden.detach()[part].clone().requires_grad_()
    own_weight = weight.detach().chunk(tp)[ctx.tp.rank].clone().requires_grad_()
    state = LossState(FACTOR if known else None, z_loss_coeff)
    total = linear_cross_entropy(
        own_hidden,
        own_weight,
        labels,
        token_weights,
        ctx=ctx,
        true_vocab_size=true,
        sequence_parallel=split,
        state=state,
    )
    (FACTOR * total).backward()
    torch.testing.assert_close(total, expected, **EXACT)
    torch.testing.assert_close(own_hidden.grad, hidden.grad[part], **EXACT)
    torch.testing.assert_close(own_weight.grad, weight.grad.chunk(tp)[ctx.tp.rank], **EXACT)
    noted = state.taken_log_z()
    assert (noted is None) == (z_loss_coeff == 0)
    if noted is not None:
        torch.testing.assert_close(noted, squares, **EXACT)
    padded = torch.arange(PADDED).chunk(tp)[ctx.tp.rank] >= true
    assert bool((own_weight.grad[padded] == 0).all())


def check_every_vocabulary(tp: int) -> None:
    module._CHUNK_BYTES["cpu"] = 3 * PADDED // tp * 8  # three tokens; in this process alone
    ctx = build(tp)
    for true in (16, TRUE, 3):  # 3: at tp = 2 and 4 some ranks hold nothing but padding
        for split, known in itertools.product((False, True), repeat=2):
            for z_loss_coeff in (0.0, 0.7):
                check_whole_vocabulary(
                    ctx, true, split=split, known=known, z_loss_coeff=z_loss_coeff
                )


@pytest.mark.parametrize("tp", [2, 4])
def test_loss_and_gradients_equal_those_of_one_rank(tp: int) -> None:
    run_on_ranks(tp, check_every_vocabulary, tp)
