"""Lion over the slots of an optimizer: updates of one size, by signs.

Chen et al. 2023, arXiv 2302.06675, algorithm 2. Every element is updated by itself, so parts of
parameters are too.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.optimizer.slots import Slot, StepScalars


class LionRule(NamedTuple):
    """The numbers of Lion that the host knows."""

    rate: float
    beta1: float
    beta2: float
    decay: float


@torch.no_grad()
def update_slots(
    slots: Sequence[Slot], gradients: Mapping[str, Tensor], rule: LionRule, scalars: StepScalars
) -> None:
    """Update weights, means and the model's half-precision parameters.

    Args:
        gradients: by the name of the slot, of as many elements.
    """
    for slot in slots:
        mean = slot.state["exp_avg"]
        gradient = scalars.counted(gradients[slot.name], slot.weight)
        sign = torch.lerp(gradient, mean, rule.beta1).sign()
        slot.take(slot.weight * (1 - rule.rate * rule.decay) - rule.rate * sign, scalars.applied)
        new_mean = torch.lerp(gradient, mean, rule.beta2)
        mean.copy_(torch.where(scalars.applied, new_mean, mean))
