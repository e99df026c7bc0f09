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
