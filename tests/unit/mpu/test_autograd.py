"""A context is what torch hands to a function's forward and backward."""

import torch
from torch import Tensor

from megatron.mpu.autograd import FunctionContext


class _ScaledContext(FunctionContext):
    factor: float


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ScaledContext, tensor: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.factor = factor
        return tensor * factor

    @staticmethod
    def backward(ctx: _ScaledContext, grad: Tensor) -> tuple[Tensor | None, None]:
        (tensor,) = ctx.saved_tensors
        assert torch.equal(tensor, torch.ones(3))
        return (grad * ctx.factor if ctx.needs_input_grad[0] else None), None


def test_torch_gives_every_attribute_that_a_context_declares() -> None:
    tensor = torch.ones(3, requires_grad=True)
    _Scaled.apply(tensor, 2.0).sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), 2.0))
