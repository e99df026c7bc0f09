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

    weights: Sequence[Tensor]  # float32 or float64
    grads: Sequence[Tensor]  # of the dtype of the weights or, for float32, in half precision
    means: Sequence[Tensor]  # moving averages of grads: of the dtype of the weights, or bfloat16
    squares: Sequence[Tensor]  # likewise, of the squares of grads
    published: Sequence[Tensor]  # the weights in half precision; empty if there are none


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
        for old, new in ((mean, new_mean), (square, new_square), (weight, new_weight)):
            old.copy_(torch.where(is_applied, new.to(old.dtype), old))
        if published:
            published[index].copy_(torch.where(is_applied, weight, published[index]))


@shapes_of("adamw_step_")
def _shapes(*operands: object) -> None:
    return None
