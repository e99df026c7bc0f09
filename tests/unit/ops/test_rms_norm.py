"""RMSNorm means what PyTorch's means; the law of kernels is in tests/laws/kernels."""

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.rms_norm import add_rms_norm, rms_norm, rms_norm_reference


def test_the_reference_is_the_norm_of_pytorch():
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    out, added, rstd = rms_norm_reference(x, None, weight, 1e-3)
    torch.testing.assert_close(out, F.rms_norm(x, (5,), weight, 1e-3), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(rstd, (x.square().mean(-1) + 1e-3) ** -0.5, rtol=1e-14, atol=0)
    assert added.numel() == 0


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_output_has_the_dtype_of_the_weight_and_the_sum_that_of_x(stream):
    x, weight = torch.ones(2, 4, dtype=stream), torch.ones(4, dtype=torch.bfloat16)
    out, added = add_rms_norm(x, x, weight, 0.0)
    assert (out.dtype, added.dtype) == (torch.bfloat16, stream)
    assert torch.equal(added, 2 * x)
    assert torch.equal(out, torch.ones_like(out))
    assert rms_norm(x, weight, 0.0).dtype == torch.bfloat16


def test_the_sum_alone_has_a_gradient_too():
    x, other = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    weight = torch.ones(3, requires_grad=True)
    add_rms_norm(x, other, weight, 1e-5)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert torch.equal(other.grad, torch.ones(2, 3))
    assert weight.grad is None


def test_wrong_operands_are_refused_before_the_operator():
    with pytest.raises(ValueError, match="does not span"):
        rms_norm(torch.empty(2, 4), torch.empty(2), 1e-5)
    with pytest.raises(ValueError, match="residual differ"):
        add_rms_norm(torch.empty(2, 4), torch.empty(4), torch.empty(4), 1e-5)
