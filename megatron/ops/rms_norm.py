"""RMSNorm over the last dimension, with a residual added before it or without.

x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019, arXiv 1910.07467). Statistics are
fp32 (fp64 of fp64), and every result is rounded once. The output has the dtype of `weight`: with an
fp32 residual stream and weights of the model's dtype it needs no further cast.
"""

import torch
from torch import Tensor

from megatron.ops.library import (
    check_row_operands,
    operator,
    register_norm_gradient,
    shapes_of,
    statistics_dtype,
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMSNorm of `x` [.., n] with the gains `weight` [n], as the dtype of `weight`.

    The dtypes of both are equal, or one is float32 and the other bfloat16 or float16.
    """
    check_row_operands(x, None, weight)
    out: Tensor = torch.ops.megatron.rms_norm(x, None, weight, epsilon)[0]
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `x + residual` [.., n], and that sum, rounded to the dtype of `x`."""
    check_row_operands(x, residual, weight)
    out, added, _ = torch.ops.megatron.rms_norm(x, residual, weight, epsilon)
    return out, added


@operator(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float epsilon)"
    " -> (Tensor out, Tensor added, Tensor rstd)"
)
def rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the sum with the residual (empty without one) and 1 / root mean square."""
    added = x.new_empty(0) if residual is None else x + residual
    wide = (x if residual is None else added).to(statistics_dtype(x))
    rstd = torch.rsqrt(wide.square().mean(-1) + epsilon)
    out = wide * rstd.unsqueeze(-1) * weight.to(wide.dtype)
    return out.to(weight.dtype), added, rstd


@operator(
    "rms_norm_backward(Tensor grad, Tensor? grad_added, Tensor x, Tensor weight, Tensor rstd)"
    " -> (Tensor grad_x, Tensor grad_weight)"
)
def rms_norm_backward_reference(
    grad: Tensor, grad_added: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the normalised sum `x` and of `weight`."""
    wide, scale = grad.to(rstd.dtype), rstd.unsqueeze(-1)
    normalised = x.to(rstd.dtype) * scale
    slope = wide * weight.to(rstd.dtype)
    grad_x = (slope - normalised * (slope * normalised).mean(-1, keepdim=True)) * scale
    if grad_added is not None:
        grad_x = grad_x + grad_added
    grad_weight = (wide * normalised).reshape(rstd.numel(), weight.numel()).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@shapes_of("rms_norm")
def _shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=weight.dtype)
    added = x.new_empty(0 if residual is None else x.shape)
    return out, added, x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))


@shapes_of("rms_norm_backward")
def _backward_shapes(
    grad: Tensor, grad_added: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


register_norm_gradient("rms_norm")
