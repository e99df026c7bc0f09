"""Activations, and gated units, in one pass each way.

A gated unit of x = [gate; up] is act(gate) * up (Shazeer 2020, arXiv 2002.05202). It saves x and
nothing else for its backward pass, which writes the gradient of both halves at once. Everything is
computed in fp32 (fp64 of fp64) and rounded once.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megatron.ops.library import gradient_of, operator, shapes_of, statistics_dtype


class ActivationKind(IntEnum):
    """The activations that have kernels, in the order of csrc/ops/activation_call.h."""

    GELU_TANH = 0
    SILU = 1
    RELU = 2
    SQUARED_RELU = 3
    IDENTITY = 4


def activate(x: Tensor, kind: ActivationKind, *, consume: bool = False) -> Tensor:
    """Return the activation of every element of `x`.

    Args:
        consume: backward writes the gradient into the memory of `x`, which is what it takes less.
            Nobody may read `x` then, and a second backward pass (`retain_graph`) raises. Compiled
            graphs, which place their tensors themselves, do not.
    """
    return _unit(x, int(kind), False, consume)


def gated_unit(x: Tensor, kind: ActivationKind, *, consume: bool = False) -> Tensor:
    """Return act(gate) * up [.., n] of `x` [.., 2n] = [gate; up].

    Args:
        consume: as for `activate`.

    Raises:
        ValueError: the last dimension of `x` has no two halves.
    """
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            "a gated unit has no two halves\n"
            f"  found: x {tuple(x.shape)}\n"
            "  fix: give [.., 2n], the gates first"
        )
    return _unit(x, int(kind), True, consume)


def _unit(x: Tensor, kind: int, gated: bool, consume: bool) -> Tensor:
    if consume and not torch.compiler.is_compiling():
        return _CONSUMING(x, kind, gated)
    out: Tensor = torch.ops.megatron.activate(x, kind, gated)
    return out


@operator("activate(Tensor x, int kind, bool gated) -> Tensor")
def activate_reference(x: Tensor, kind: int, gated: bool) -> Tensor:
    """Return the activation, times the second half where `gated`."""
    wide = x.to(statistics_dtype(x))
    if not gated:
        return activation_value(wide, kind).to(x.dtype)
    gate, up = wide.chunk(2, dim=-1)
    return (activation_value(gate, kind) * up).to(x.dtype)


@operator("activate_backward(Tensor grad, Tensor x, int kind, bool gated) -> Tensor")
def activate_backward_reference(grad: Tensor, x: Tensor, kind: int, gated: bool) -> Tensor:
    """Return the gradient of `x`."""
    wide, slope = grad.to(statistics_dtype(x)), x.to(statistics_dtype(x))
    if not gated:
        return (wide * _slope(slope, kind)).to(x.dtype)
    gate, up = slope.chunk(2, dim=-1)
    of_gate = wide * up * _slope(gate, kind)
    return torch.cat((of_gate, wide * activation_value(gate, kind)), -1).to(x.dtype)


@operator("activate_backward_(Tensor grad, Tensor(a!) x, int kind, bool gated) -> ()")
def replace_by_gradient_reference(grad: Tensor, x: Tensor, kind: int, gated: bool) -> None:
    """Write the gradient of `x`, which is contiguous, into its place."""
    x.copy_(activate_backward_reference(grad, x, kind, gated))


@shapes_of("activate")
def _shapes(x: Tensor, kind: int, gated: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2) if gated else x.shape)


@shapes_of("activate_backward")
def _backward_shapes(grad: Tensor, x: Tensor, kind: int, gated: bool) -> Tensor:
    return x.new_empty(x.shape)


@shapes_of("activate_backward_")
def _no_shapes(grad: Tensor, x: Tensor, kind: int, gated: bool) -> None:
    return None


def activation_value(x: Tensor, kind: int) -> Tensor:
    """Return the activation by PyTorch's operations, in the dtype of `x`."""
    match kind:
        case ActivationKind.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case ActivationKind.SILU:
            return F.silu(x)
        case ActivationKind.RELU:
            return x.relu()
        case ActivationKind.SQUARED_RELU:
            return x.relu().square()
        case _:
            return x


def _slope(x: Tensor, kind: int) -> Tensor:
    slope = torch.ones_like(x)
    match kind:
        case ActivationKind.GELU_TANH:
            slope = torch.ops.aten.gelu_backward(slope, x, approximate="tanh")
        case ActivationKind.SILU:
            slope = torch.ops.aten.silu_backward(slope, x)
        case ActivationKind.RELU:
            slope = (x > 0).to(x.dtype)
        case ActivationKind.SQUARED_RELU:
            slope = 2 * x.relu()
    return slope


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.kind, ctx.gated = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return torch.ops.megatron.activate_backward(grad, x, ctx.kind, ctx.gated), None, None


gradient_of("activate", _backward, _save)


class _Consuming(torch.autograd.Function):
    """The operator `activate` with the gradient of its input in the place of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int, gated: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.gated = kind, gated
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = torch.ops.megatron.activate(x, kind, gated)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if not x.is_contiguous():  # a hook on saved tensors may return another one
            return _backward(ctx, grad)
        x = x.detach()
        torch.ops.megatron.activate_backward_(grad, x, ctx.kind, ctx.gated)
        increment_version(x)  # so that a second backward pass raises
        return x, None, None


_CONSUMING: Callable[[Tensor, int, bool], Tensor] = _Consuming.apply
