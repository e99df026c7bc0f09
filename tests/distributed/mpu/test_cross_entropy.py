"""Tests of vocabulary-parallel cross entropy against torch's over the whole vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.cross_entropy import cross_entropy_and_log_z, vocab_parallel_cross_entropy
from tests.distributed.mpu.reference import EXACT, build, sample
from tests.support.ranks import run_on_ranks

PADDED = 16


def losses_and_gradients_equal_torchs(tp: int, true: int) -> None:
    ctx = build(tp)
    whole = (5 * sample(6, 2, PADDED, seed=1)).requires_grad_()
    labels = torch.arange(12).view(6, 2) % true
    labels[0, 0] = -1  # nothing to predict here
    weights, weights_of_log_z = sample(6, 2, seed=2), sample(6, 2, seed=3)
    expected = F.cross_entropy(
        whole[..., :true].flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
    ).view(6, 2)
    expected_log_z = torch.logsumexp(whole[..., :true], dim=-1) * (labels >= 0)
    ((expected * weights).sum() + (expected_log_z * weights_of_log_z).sum()).backward()
    logits = whole.detach().chunk(tp, -1)[ctx.tp.rank].clone().requires_grad_()
    losses, log_z = cross_entropy_and_log_z(logits, labels, ctx=ctx, true_vocab_size=true)
    ((losses * weights).sum() + (log_z * weights_of_log_z).sum()).backward()
    torch.testing.assert_close(losses, expected, **EXACT)
    torch.testing.assert_close(log_z, expected_log_z, **EXACT)
    torch.testing.assert_close(logits.grad, whole.grad.chunk(tp, -1)[ctx.tp.rank], **EXACT)
    padded = torch.arange(PADDED).chunk(tp)[ctx.tp.rank] >= true
    assert bool((logits.grad[..., padded] == 0).all())
    losses = vocab_parallel_cross_entropy(
        logits.detach().bfloat16(), labels, ctx=ctx, true_vocab_size=true
    )
    assert losses.dtype == torch.float32


def every_vocabulary(tp: int) -> None:
    for true in (16, 13, 3):  # 3: at tp = 2 and 4 some ranks hold nothing but padding
        losses_and_gradients_equal_torchs(tp, true)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_losses_and_gradients_equal_torchs(tp: int) -> None:
    run_on_ranks(tp, every_vocabulary, tp)
