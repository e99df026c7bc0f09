"""Activations as the law of kernels sees them: how exact results have to be."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.activation import (
    ActivationKind,
    activate_backward_reference,
    activate_reference,
)
from megatron.ops.library import statistics_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((0, 8), (3, 0), (8,), (1, 2), (5, 2), (2, 3, 14), (33, 130), (1, 4098), (700, 16))
# Units in the last place of the dtype that is computed in: one for the exponential, of which the
# argument, up to 2.5 x^2 here, is wrong by as many; and one for each product behind it.
COMPUTED_ULPS = 8
KERNEL = torch.ops.megatron


def draw(
    shape: tuple[int, ...], dtype: torch.dtype, *, gated: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the output, and x with numbers in every range of an activation."""
    drawn = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(shape, generator=drawn, dtype=torch.float64)
    x[..., ::7] *= 20  # where activations are flat or straight
    out = (*shape[:-1], shape[-1] // 2) if gated else shape
    grad = torch.randn(out, generator=drawn, dtype=torch.float64)
    return grad.to(dtype), x.to(dtype)


def check_kind(
    kind: ActivationKind,
    grad: Tensor,
    x: Tensor,
    *,
    gated: bool,
    forward: Callable[..., Tensor] = KERNEL.activate.default,
    backward: Callable[..., Tensor] = KERNEL.activate_backward.default,
) -> None:
    """Run both operators and check their results against the references in fp64."""
    wide_grad, wide = grad.double(), x.double()
    gate, up = wide.chunk(2, dim=-1) if gated else (wide, torch.ones_like(wide))
    spread = 1 + gate.square().clamp(max=100)  # beyond, exponentials are zero or one
    _check(
        forward(x, int(kind), gated),
        activate_reference(wide, kind, gated),
        spread * (1 + gate.abs()) * (gate if kind == ActivationKind.SQUARED_RELU else 1) * up,
        statistics_dtype(x),
        x.dtype,
    )
    replaced = x.clone(memory_format=torch.contiguous_format)
    KERNEL.activate_backward_(grad, replaced, int(kind), gated)
    assert torch.equal(replaced, KERNEL.activate_backward(grad, x, int(kind), gated))
    of_gate, of_up = spread * (1 + gate.abs()) * up * wide_grad, spread * gate * wide_grad
    _check(
        backward(grad, x, int(kind), gated),
        activate_backward_reference(wide_grad, wide, kind, gated),
        torch.cat((of_gate, of_up * (1 + gate.abs())), -1) if gated else of_gate,
        statistics_dtype(x),
        x.dtype,
    )


def check_some() -> None:
    """Check a few shapes in every dtype."""
    for dtype in DTYPES:
        for kind in ActivationKind:
            for gated in (False, True):
                for shape in SHAPES[4:8]:
                    check_kind(kind, *draw(shape, dtype, gated=gated), gated=gated)


def _check(
    made: Tensor, expected: Tensor, scale: Tensor, computed: torch.dtype, dtype: torch.dtype
) -> None:
    assert made.dtype == dtype
    assert made.shape == expected.shape
    of_dtype = torch.finfo(dtype)
    rounding = of_dtype.eps / 2 * expected.abs() + of_dtype.smallest_normal
    bound = rounding + COMPUTED_ULPS * torch.finfo(computed).eps * scale.abs()
    error = (made.double() - expected).abs()
    error.masked_fill_(made == expected.to(dtype), 0.0)  # infinity where a half overflows
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert (error <= bound).all(), f"{worst:.3g} times the error that is allowed"
