"""Linear layers as an operator that torch.compile calls, and does not look into.

A layer communicates, and its backward pass adds the weight's gradient to a buffer; neither can be
traced. What a reader would get wrong: a graph serves many layers, so it gets the number of the
layer as a tensor, and the layer itself is found by that number when the operator runs.
"""

from itertools import count
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron.ops.library import gradient_of, operator, shapes_of


class OpaqueLinear(Protocol):
    """A linear layer that computes its products without autograd."""

    def product(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output of an input, after communication, and what its gradient needs.

        The latter is [`keeps`] in fp32.
        """

    def input_gradient(self, grad: Tensor, hidden: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient of the input, and add that of the weight to its buffer."""


_NUMBERS = count()
_LAYERS: WeakValueDictionary[int, OpaqueLinear] = WeakValueDictionary()


def numbered(layer: OpaqueLinear) -> Tensor:
    """Return the number by which the operator finds `layer`, which is not kept alive by it."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")  # the host reads it, whatever the device of the layer


def opaque_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    *,
    gathers: int = 1,
    scatters: int = 1,
    keeps: int = 0,
) -> Tensor:
    """Return the output of the layer of `number`; `hidden` must require a gradient.

    Args:
        weight: [out/tp, in] or [out, in/tp], of which the gradient goes into its buffer.
        bias: of the output, if the layer itself adds one.
        gathers: the output has so many times the rows of the sequence that the input has.
        scatters: the output has one of so many parts of those rows.
        keeps: numbers that the layer keeps for its backward pass.
    """
    out, _ = torch.ops.megatron.linear(hidden, weight, bias, number, gathers, scatters, keeps)
    return cast(Tensor, out)


@operator(
    "linear(Tensor hidden, Tensor weight, Tensor? bias, Tensor number, int gathers, int scatters, "
    "int keeps) -> (Tensor, Tensor)"
)
def linear_product(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    gathers: int,
    scatters: int,
    keeps: int,
) -> tuple[Tensor, Tensor]:
    """Return the output of a layer, and what its backward pass needs."""
    return _LAYERS[int(number)].product(hidden, bias)


@operator("linear_input_gradient(Tensor grad, Tensor hidden, Tensor number, Tensor kept) -> Tensor")
def linear_input_gradient(grad: Tensor, hidden: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    """Return the gradient of the input of a layer; that of the weight is added to its buffer."""
    return _LAYERS[int(number)].input_gradient(grad, hidden, kept)


@shapes_of("linear")
def _shapes(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor,
    gathers: int,
    scatters: int,
    keeps: int,
) -> tuple[Tensor, Tensor]:
    length, *others, _ = hidden.shape
    out = hidden.new_empty((length * gathers // scatters, *others, weight.shape[0]))
    return out, hidden.new_empty(keeps, dtype=torch.float32)


@shapes_of("linear_input_gradient")
def _gradient_shapes(grad: Tensor, hidden: Tensor, number: Tensor, kept: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, _, bias, number, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, number, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    # Else the graph would leave out the operator, and with it the gradient of the weight.
    assert ctx.needs_input_grad[0]  # noqa: S101  # invariant: checked where a layer is compiled
    grad_hidden = torch.ops.megatron.linear_input_gradient(grad, *ctx.saved_tensors)
    grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
    return grad_hidden, None, grad_bias, None, None, None, None


gradient_of("linear", _backward, _save)
