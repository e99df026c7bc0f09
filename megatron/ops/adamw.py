"""AdamW in one pass: decoupled decay (Loshchilov and Hutter 2017, arXiv 1711.05101).

The gradient is read in its own dtype and multiplied by a factor from the device. State may be
narrower than the weight: it is widened, updated and rounded to nearest. Everything is computed in
the dtype of the weight. A step that does not count, which the device decides, changes nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.ops.library import operator, shapes_of


class AdamwRule(NamedTuple):
    """The numbers of AdamW that the host knows."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float


class AdamwTensors(NamedTuple):
    """Lists of tensors, each of one dtype; all are contiguous and on one device."""

    weights: Sequence[Tensor]  # float32 or float64; or int16, lower halves of float32
    grads: Sequence[Tensor]  # of the dtype of the weights or, for float32, in half precision
    means: Sequence[Tensor]  # moving averages of grads: of the dtype of the weights, or bfloat16
    squares: Sequence[Tensor]  # likewise, of the squares of grads
    # The weights in half precision; empty if there are none. Of lower halves the upper ones.
    published: Sequence[Tensor]


@torch.no_grad()
def adamw_step_(
    tensors: AdamwTensors, rule: AdamwRule, *, factor: Tensor, applied: Tensor, steps: Tensor
) -> None:
    """Update weights and state, and round the weights into `published`, in place.

    Args:
        tensors: all of it is written but the gradients.
        factor: turns gradients into those that count; a scalar, as the two below.
        applied: whether the step counts.
        steps: that were counted, this one included.
    """
    steps = steps.double()
    correction = (1 - rule.beta1**steps, (1 - rule.beta2**steps).sqrt())
    scalars = torch.stack((factor.double(), applied.double(), *correction))
    torch.ops.megatron.adamw_step_(*map(list, tensors), scalars, list(rule))
    # A backward pass of a graph with the old weights raises, as after torch's own updates.
    torch.autograd.graph.increment_version([*tensors.weights, *tensors.published])


def join_halves(upper: Tensor, lower: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the float32 weights whose upper halves are bfloat16, and whose lower ones int16.

    Args:
        out: float32 of as many elements, which takes them.
    """
    whole = torch.empty_like(upper, dtype=torch.float32) if out is None else out
    bits = whole.view(torch.int32)
    bits.copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(lower)
    return whole


def split_halves(weight: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Write the halves of float32 weights: rounded to nearest, and what `join_halves` needs.

    The lower half is what a bfloat16 lacks of the weight, in units of the last place of float32:
    an int16. It would be 2^15, one too many, of a weight halfway between two bfloat16s of which the
    lower is even. Such a weight gives way to the next float32 towards zero, in an update also where
    it is kept whole, so that both have the same bits.
    """
    bits = _between_halves(weight).view(torch.int32)
    bits = torch.where(weight.isnan(), 0x7FC00000, bits)
    rounded = bits + 0x8000 >> 16
    upper.view(torch.int16).copy_(rounded)
    lower.copy_(bits - (rounded << 16))


def _between_halves(weight: Tensor) -> Tensor:
    """Return float32 weights with the next number towards zero for those that have no halves."""
    bits = weight.view(torch.int32)
    return (bits - (bits & 0x1FFFF == 0x8000).int()).view(torch.float32)


@operator(
    "adamw_step_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] means, Tensor(c!)[] squares,"
    " Tensor(d!)[] published, Tensor scalars, float[] numbers) -> ()"
)
def adamw_step_reference(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    published: list[Tensor],
    scalars: Tensor,
    numbers: list[float],
) -> None:
    """Update every tensor by PyTorch's operations.

    Scalars: the factor, whether the step counts, both corrections. Numbers are those of the rule.
    """
    is_applied, rule = scalars[1] != 0, AdamwRule(*numbers)
    if weights and weights[0].dtype == torch.int16:
        whole = [join_halves(*halves) for halves in zip(published, weights)]
        adamw_step_reference(whole, grads, means, squares, [], scalars, numbers)
        for weight, upper, lower in zip(whole, published, weights):
            split_halves(weight, upper, lower)
        return
    for index, (weight, grad, mean, square) in enumerate(zip(weights, grads, means, squares)):
        factor, _, correction1, correction2 = scalars.to(weight.dtype)
        gradient = grad.to(weight.dtype) * factor
        wide = mean.to(weight.dtype)
        new_mean = wide + (1 - rule.beta1) * (gradient - wide)
        of_gradient = (1 - rule.beta2) * gradient * gradient
        new_square = rule.beta2 * square.to(weight.dtype) + of_gradient
        spread = new_square.sqrt() / correction2 + rule.epsilon
        change = rule.rate / correction1 * new_mean / spread
        new_weight = weight * (1 - rule.rate * rule.decay) - change
        if published and published[index].dtype == torch.bfloat16:
            new_weight = _between_halves(new_weight)
        for old, new in ((mean, new_mean), (square, new_square), (weight, new_weight)):
            old.copy_(torch.where(is_applied, new.to(old.dtype), old))
        if published:
            published[index].copy_(torch.where(is_applied, weight, published[index]))


@shapes_of("adamw_step_")
def _shapes(*operands: object) -> None:
    return None
