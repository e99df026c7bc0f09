"""Tests of cross entropy in one process against torch's."""

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import DataError
from megatron.mpu.context import ParallelContext
from megatron.mpu.cross_entropy import cross_entropy_and_log_z, vocab_parallel_cross_entropy

ALONE = ParallelContext.single()
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # fp64: a few roundings of numbers near one
FP32 = {"rtol": 2e-6, "atol": 2e-6}  # fp32: the same, with logits up to about 10


def sample(width: int, true: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    logits = (3 * torch.randn(5, 2, width, dtype=torch.float64)).to(dtype).requires_grad_()
    return logits, torch.randint(0, true, (5, 2))


@pytest.mark.parametrize(("width", "true"), [(16, 16), (16, 13), (16, 1)])
def test_losses_and_gradients_equal_torchs(width: int, true: int) -> None:
    logits, labels = sample(width, true, torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64)
    losses = vocab_parallel_cross_entropy(logits, labels, ctx=ALONE, true_vocab_size=true)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
    expected = F.cross_entropy(
        logits[..., :true].flatten(0, 1), labels.flatten(), reduction="none"
    ).view(5, 2)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(losses, expected, **EXACT)
    torch.testing.assert_close(gradient, expected_gradient, **EXACT)
    assert bool((gradient[..., true:] == 0).all())


@pytest.mark.parametrize(("width", "true"), [(16, 16), (16, 13), (16, 1)])
def test_log_z_is_the_log_sum_exp_of_the_true_vocabulary(width: int, true: int) -> None:
    logits, labels = sample(width, true, torch.float64)
    weights = torch.rand(5, 2, dtype=torch.float64)
    losses, log_z = cross_entropy_and_log_z(logits, labels, ctx=ALONE, true_vocab_size=true)
    torch.testing.assert_close(log_z, torch.logsumexp(logits[..., :true], dim=-1), **EXACT)
    total = (losses * weights).sum() + (log_z.square() * weights).sum()
    (gradient,) = torch.autograd.grad(total, logits)
    true_logits = logits[..., :true]
    expected_losses = F.cross_entropy(
        true_logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(5, 2)
    squares = torch.logsumexp(true_logits, dim=-1).square()
    (expected,) = torch.autograd.grad(((expected_losses + squares) * weights).sum(), logits)
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_gradients_of_losses_and_log_z_are_those_of_differences() -> None:
    logits, labels = sample(7, 5, torch.float64)
    labels[0, 0] = -1

    def both(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy_and_log_z(given, labels, ctx=ALONE, true_vocab_size=5)

    assert torch.autograd.gradcheck(both, (logits,))
    assert torch.autograd.gradcheck(lambda given: both(given)[1], (logits,))  # alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_computed_in_fp32(dtype: torch.dtype) -> None:
    logits, labels = sample(16, 13, dtype)
    losses = vocab_parallel_cross_entropy(logits, labels, ctx=ALONE, true_vocab_size=13)
    losses.sum().backward()
    precise = logits.detach().double().requires_grad_()
    expected = vocab_parallel_cross_entropy(precise, labels, ctx=ALONE, true_vocab_size=13)
    expected.sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected.float(), **FP32)
    assert logits.grad.dtype == dtype
    one_rounding = {"rtol": torch.finfo(dtype).eps, "atol": 2e-6}
    torch.testing.assert_close(logits.grad, precise.grad.to(dtype), **one_rounding)


def test_extreme_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), ctx=ALONE, true_vocab_size=3)
    losses.sum().backward()
    assert losses.item() == 2e4
    assert logits.grad.tolist() == [[[1.0, -1.0, 0.0]]]


def test_a_negative_label_has_no_loss_and_no_gradient() -> None:
    logits, labels = sample(16, 13, torch.float32)
    labels[0, 0], labels[3, 1] = -1, -100
    losses, log_z = cross_entropy_and_log_z(logits, labels, ctx=ALONE, true_vocab_size=13)
    (losses + (log_z + 1).square()).sum().backward()
    for place in ((0, 0), (3, 1)):
        assert losses[place] == log_z[place] == 0
        assert bool((logits.grad[place] == 0).all())
    assert int((losses == 0).sum()) == 2


def test_a_non_finite_logit_gives_a_non_finite_loss() -> None:
    for bad in (torch.nan, torch.inf):
        logits, labels = sample(16, 13, torch.float32)
        logits = logits.detach().clone()
        logits[0, 0, 2] = bad
        losses = vocab_parallel_cross_entropy(logits, labels, ctx=ALONE, true_vocab_size=13)
        assert not losses[0, 0].isfinite()
        assert bool(losses[1:].isfinite().all())


def test_a_label_among_the_padding_is_refused() -> None:
    logits, labels = sample(16, 13, torch.float32)
    labels[0, 0] = 13
    with pytest.raises(DataError, match="a token id is outside the vocabulary"):
        vocab_parallel_cross_entropy(logits, labels, ctx=ALONE, true_vocab_size=13)


def test_the_logits_are_not_changed_and_backward_works_again() -> None:
    logits, labels = sample(16, 16, torch.float32)
    before = logits.detach().clone()
    total = vocab_parallel_cross_entropy(logits, labels, ctx=ALONE, true_vocab_size=16).sum()
    first, second = (torch.autograd.grad(total, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(logits, before)
    assert torch.equal(first, second)
