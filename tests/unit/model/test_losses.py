"""Losses are sums over counted tokens."""

import torch
import torch.nn.functional as F

from megatron.model.losses import counted_tokens, language_model_loss
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState

CTX = ParallelContext.single()
LOGITS = torch.randn(5, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
EACH = F.cross_entropy(LOGITS[..., :10].flatten(0, 1), LABELS.t().flatten(), reduction="none")
EACH = EACH.view(5, 2).t()  # [b, s]
SAME = {"rtol": 1e-12, "atol": 1e-12}  # float64


def test_without_a_mask_every_token_counts() -> None:
    total, count = language_model_loss(LOGITS, LABELS, None, ctx=CTX, true_vocab_size=10)
    torch.testing.assert_close(total, EACH.sum(), **SAME)
    assert count.item() == 10


def test_masked_tokens_count_neither_in_the_sum_nor_in_the_count() -> None:
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 0, 0, 0, 1]])
    loss = language_model_loss(LOGITS, LABELS, mask, ctx=CTX, true_vocab_size=10)
    torch.testing.assert_close(loss.total, (EACH * mask).sum(), **SAME)
    assert loss.count.item() == 5
    torch.testing.assert_close(loss.mean, (EACH * mask).sum() / 5, **SAME)


def test_negative_labels_are_left_out_of_both() -> None:
    labels = LABELS.clone()
    labels[0, :3] = -100
    total, count = language_model_loss(LOGITS, labels, None, ctx=CTX, true_vocab_size=10)
    torch.testing.assert_close(total, EACH.sum() - EACH[0, :3].sum(), **SAME)
    assert count.item() == 7


def test_two_microbatches_add_up_to_one_batch() -> None:
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 0, 0, 0, 1]])
    whole = language_model_loss(LOGITS, LABELS, mask, ctx=CTX, true_vocab_size=10)
    parts = [
        language_model_loss(
            LOGITS[:, i : i + 1], LABELS[i : i + 1], mask[i : i + 1], ctx=CTX, true_vocab_size=10
        )
        for i in range(2)
    ]
    torch.testing.assert_close(sum(p.total for p in parts), whole.total, **SAME)
    assert sum(p.count.item() for p in parts) == whole.count.item()


def test_half_precision_logits_give_an_fp32_loss() -> None:
    loss = language_model_loss(LOGITS.bfloat16(), LABELS, None, ctx=CTX, true_vocab_size=10)
    assert loss.total.dtype == loss.count.dtype == torch.float32


def test_labels_and_mask_alone_say_how_much_is_counted() -> None:
    labels = LABELS.clone()
    labels[0, :3] = -1
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 0, 0.5, 0, 1]])
    for given in (None, mask):
        loss = language_model_loss(LOGITS, labels, given, ctx=CTX, true_vocab_size=10)
        assert counted_tokens(labels, given).item() == loss.count.item()


def test_a_z_loss_enters_by_its_gradient_alone() -> None:
    mask = torch.tensor([[1.0, 1, 0, 1, 1], [0, 0, 0.5, 0, 1]])
    labels = LABELS.clone()
    labels[0, 0] = -1
    gradients, totals = [], []
    state = LossState(z_loss_coeff=0.3)
    for given in (state, None):
        logits = LOGITS.clone().requires_grad_()
        loss = language_model_loss(logits, labels, mask, ctx=CTX, true_vocab_size=10, state=given)
        totals.append(loss.total.detach())
        gradients.append(torch.autograd.grad(loss.total, logits)[0])
    assert torch.equal(*totals)
    logits = LOGITS.clone().requires_grad_()
    weights = (mask * (labels >= 0)).t()
    squares = (torch.logsumexp(logits[..., :10], dim=-1).square() * weights).sum()
    (of_squares,) = torch.autograd.grad(squares, logits)
    torch.testing.assert_close(gradients[0], gradients[1] + 0.3 * of_squares, **SAME)
    torch.testing.assert_close(state.taken_log_z(), squares.detach(), **SAME)


def test_a_loss_without_gradients_has_no_z_loss() -> None:
    state = LossState(z_loss_coeff=0.3)
    loss = language_model_loss(LOGITS, LABELS, None, ctx=CTX, true_vocab_size=10, state=state)
    torch.testing.assert_close(loss.total, EACH.sum(), **SAME)
    assert state.taken_log_z() is None
