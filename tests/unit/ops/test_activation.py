"""Activations and gated units mean what PyTorch's do; the law of kernels is in tests/laws."""

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.activation import (
    ActivationKind,
    activate,
    activate_backward_reference,
    activate_reference,
    gated_unit,
    replace_by_gradient_reference,
)

PYTORCH = {
    ActivationKind.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    ActivationKind.SILU: F.silu,
    ActivationKind.RELU: F.relu,
    ActivationKind.SQUARED_RELU: lambda x: F.relu(x).square(),
    ActivationKind.IDENTITY: lambda x: x,
}


@pytest.mark.parametrize("kind", ActivationKind)
def test_references_are_the_units_of_pytorch(kind):
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    for gated, expected in ((False, PYTORCH[kind](x)), (True, PYTORCH[kind](gate) * up)):
        grad = torch.randn(expected.shape, dtype=torch.float64)
        (slope,) = torch.autograd.grad(expected, x, grad)
        made = activate_reference(x.detach(), kind, gated)
        torch.testing.assert_close(made, expected.detach(), rtol=1e-13, atol=1e-13)
        found = activate_backward_reference(grad, x.detach(), kind, gated)
        torch.testing.assert_close(found, slope, rtol=1e-13, atol=1e-13)


def test_half_precision_is_rounded_once():
    gate, up = torch.full((64,), 1.01).bfloat16(), torch.linspace(1, 2, 64).bfloat16()
    made = gated_unit(torch.cat((gate, up)), ActivationKind.SILU)
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    assert torch.equal(made, once)
    assert not torch.equal(once, F.silu(gate) * up)
    assert activate(gate, ActivationKind.SILU).dtype == torch.bfloat16


def test_a_gated_unit_without_two_halves_is_refused():
    for x in (torch.zeros(2, 3), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"no two halves\n  found: x .*\n  fix: give \[.., 2n"):
            gated_unit(x, ActivationKind.SILU)


@pytest.mark.parametrize("gated", [False, True])
def test_a_gradient_takes_the_place_of_an_input_that_is_consumed(gated):
    unit = gated_unit if gated else activate
    leaf = torch.randn(5, 8, requires_grad=True)
    expected = torch.autograd.grad(unit(leaf, ActivationKind.SILU).square().sum(), leaf)
    x = leaf * 1
    memory, grads = x.data_ptr(), []
    x.register_hook(lambda grad: grads.append(grad.data_ptr()))
    total = unit(x, ActivationKind.SILU, consume=True).square().sum()
    found = torch.autograd.grad(total, leaf, retain_graph=True)
    assert torch.equal(*found, *expected)
    assert grads == [memory]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, leaf)


def test_a_consumed_input_has_no_second_derivative():
    leaf = torch.randn(5, 8, requires_grad=True)
    total = activate(leaf * 1, ActivationKind.SILU, consume=True).square().sum()
    (grad,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_input_that_comes_back_with_other_strides_is_left_alone():
    leaf = torch.randn(5, 8, requires_grad=True)
    expected = torch.autograd.grad(activate(leaf, ActivationKind.SILU).sum(), leaf)
    kept = leaf.detach().t().contiguous().t()
    before = kept.clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: kept):
        total = activate(leaf * 1, ActivationKind.SILU, consume=True).sum()
    assert torch.equal(*torch.autograd.grad(total, leaf), *expected)
    assert torch.equal(kept, before)


def test_without_gradients_nothing_is_consumed():
    x = torch.randn(5, 8)
    before = x.clone()
    out = gated_unit(x, ActivationKind.SILU, consume=True)
    assert not out.requires_grad
    assert torch.equal(x, before)


def test_the_reference_writes_a_gradient_in_place():
    x, grad = torch.randn(3, 10), torch.randn(3, 5)
    expected = activate_backward_reference(grad, x, ActivationKind.SILU, True)
    replace_by_gradient_reference(grad, x, ActivationKind.SILU, True)
    assert torch.equal(x, expected)
