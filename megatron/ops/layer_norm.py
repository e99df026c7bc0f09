"""LayerNorm over the last dimension, with a residual added before it or without.

(x - mean) / sqrt(variance + epsilon) * weight + bias (Ba et al. 2016, arXiv 1607.06450), with the
variance over n, not n - 1. Dtypes and rounding are those of `rms_norm`; `bias` is of the dtype of
`weight`.
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return the LayerNorm of `x` [.., n] with `weight` [n] and `bias` [n], as their dtype.

    The dtypes of `x` and of both are equal, or one is float32 and the other bfloat16 or float16.
    """
    check_row_operands(x, None, weight, bias)
    out: Tensor = torch.ops.megatron.layer_norm(x, None, weight, bias, epsilon)[0]
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the LayerNorm of `x + residual` [.., n], and that sum, rounded to the dtype of `x`."""
    check_row_operands(x, residual, weight, bias)
    out, added, *_ = torch.ops.megatron.layer_norm(x, residual, weight, bias, epsilon)
    return out, added


@operator(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor bias, float epsilon)"
    " -> (Tensor out, Tensor added, Tensor mean, Tensor rstd)"
)
def layer_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output, the sum (empty without a residual), the mean and 1 / deviation."""
    added = x.new_empty(0) if residual is None else x + residual
    wide = (x if residual is None else added).to(statistics_dtype(x))
    mean = wide.mean(-1)
    centered = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centered.square().mean(-1) + epsilon)
    out = centered * rstd.unsqueeze(-1) * weight.to(wide.dtype) + bias.to(wide.dtype)
    return out.to(weight.dtype), added, mean, rstd


@operator(
    "layer_norm_backward(Tensor grad, Tensor? grad_added, Tensor x, Tensor weight, Tensor mean,"
    " Tensor rstd) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"
)
def layer_norm_backward_reference(
    grad: Tensor,
    grad_added: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the normalised sum `x`, of `weight` and of `bias`."""
    wide = grad.to(rstd.dtype)
    normalised = (x.to(rstd.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    slope = wide * weight.to(rstd.dtype)
    along = normalised * (slope * normalised).mean(-1, keepdim=True)
    grad_x = (slope - slope.mean(-1, keepdim=True) - along) * rstd.unsqueeze(-1)
    if grad_added is not None:
        grad_x = grad_x + grad_added
    grad_weight, grad_bias = (
        sums.reshape(rstd.numel(), weight.numel()).sum(0).to(weight.dtype)
        for sums in (wide * normalised, wide)
    )
    return grad_x.to(x.dtype), grad_weight, grad_bias


@shapes_of("layer_norm")
def _shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=weight.dtype)
    added = x.new_empty(0 if residual is None else x.shape)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=statistics_dtype(x)) for _ in range(2))
    return out, added, mean, rstd


@shapes_of("layer_norm_backward")
def _backward_shapes(
    grad: Tensor,
    grad_added: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


register_norm_gradient("layer_norm")
