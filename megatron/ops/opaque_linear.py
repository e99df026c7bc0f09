"""Linear layers as an operator that torch.compile calls, and does not look into.

A layer communicates, and its backward pass adds the weight's gradient to a buffer; neither can be
traced. What a reader would get wrong: a graph serves many layers, so it gets the number of the
layer as a tensor, and the layer itself is found by that number when the operator runs.
"""

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megatron.ops.library import operator, shapes_of


class OpaqueLinear(Protocol):
    """A linear layer that computes its two products without autograd."""

    def product(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of an input, after communication."""

    def input_gradient(self, grad: Tensor, hidden: Tensor) -> Tensor:
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
) -> Tensor:
    """Return the output of the layer of `number`; `hidden` must require a gradient.

    Args:
        weight: [out/tp, in] or [out, in/tp], of which the gradient goes into its buffer.
        bias: of the output, if the layer itself adds one.
        gathers: the output has so many times the rows of the sequence that the input has.
        scatters: the output has one of so many parts of those rows.
    """
    out: Tensor = torch.ops.megatron.linear(hidden, weight, bias, number, gathers, scatters)
    return out


@operator(
    "linear(Tensor hidden, Tensor weight, Tensor? bias, Tensor number, int gathers, int scatters)"
    " -> Tensor"
)
def linear_product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, gathers: int, scatters: int
) -> Tensor:
    """Return the output of a layer."""
    return _LAYERS[int(number)].product(hidden, bias)


@operator("linear_input_gradient(Tensor grad, Tensor hidden, Tensor number) -> Tensor")
def linear_input_gradient(grad: Tensor, hidden: Tensor, number: Tensor) -> Tensor:
    """Return the gradient of the input of a layer; that of the weight is added to its buffer."""
    return _LAYERS[int(number)].input_gradient(grad, hidden)


@shapes_of("linear")
def _shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, gathers: int, scatters: int
) -> Tensor:
    length, *others, _ = hidden.shape
    return hidden.new_empty((length * gathers // scatters, *others, weight.shape[0]))


@shapes_of("linear_input_gradient")
def _gradient_shapes(grad: Tensor, hidden: Tensor, number: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, _, bias, number, *_ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(hidden, number)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Else the graph would leave out the operator, and with it the gradient of the weight.
    assert ctx.needs_input_grad[0]  # noqa: S101  # invariant: checked where a layer is compiled
    grad_hidden = torch.ops.megatron.linear_input_gradient(grad, *ctx.saved_tensors)
    grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
    return grad_hidden, None, grad_bias, None, None, None


torch.library.register_autograd("megatron::linear", _backward, setup_context=_save)
