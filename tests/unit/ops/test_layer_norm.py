"""LayerNorm means what PyTorch's means; the law of kernels is in tests/laws/kernels."""

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.layer_norm import add_layer_norm, layer_norm, layer_norm_reference


def test_the_reference_is_the_norm_of_pytorch():
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in [(3, 5), (5,), (5,)])
    out, added, mean, rstd = layer_norm_reference(x, None, weight, bias, 1e-3)
    expected = F.layer_norm(x, (5,), weight, bias, 1e-3)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)
    variance = x.var(-1, correction=0)
    torch.testing.assert_close(rstd, (variance + 1e-3) ** -0.5, rtol=1e-13, atol=0)
    torch.testing.assert_close(mean, x.mean(-1))
    assert added.numel() == 0


@pytest.mark.parametrize("stream", [torch.float32, torch.float16])
def test_the_output_has_the_dtype_of_the_weight_and_the_sum_that_of_x(stream):
    x = torch.tensor([[1.0, 3.0]], dtype=stream)
    weight, bias = torch.ones(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    out, added = add_layer_norm(x, x, weight, bias, 0.0)
    assert (out.dtype, added.dtype) == (torch.float16, stream)
    assert torch.equal(added, 2 * x)
    assert out.tolist() == [[-1.0, 1.0]]
    assert layer_norm(x, weight, bias, 0.0).tolist() == [[-1.0, 1.0]]


def test_the_sum_alone_has_a_gradient_too():
    x, other = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    weight, bias = (torch.ones(3, requires_grad=True) for _ in range(2))
    add_layer_norm(x, other, weight, bias, 1e-5)[1].sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert torch.equal(other.grad, torch.ones(2, 3))
    assert weight.grad is None
    assert bias.grad is None


def test_wrong_operands_are_refused_before_the_operator():
    four = torch.empty(4)
    with pytest.raises(ValueError, match="does not span"):
        layer_norm(torch.empty(2, 4), four, torch.empty(3), 1e-5)
    with pytest.raises(ValueError, match="residual differ"):
        add_layer_norm(torch.empty(2, 4), four, four, four, 1e-5)
