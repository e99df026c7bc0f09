"""Formulas about experts, in loops."""

import torch
from torch import Tensor


def balance_by_the_paper(scores: Tensor, chosen: Tensor) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437 in loops, without the weight alpha."""
    length, batch, experts = scores.shape
    taken, total = chosen.shape[-1], scores.new_zeros(())
    for row in range(batch):
        for i in range(experts):
            often = sum(i in chosen[t, row].tolist() for t in range(length))
            f = experts / (taken * length) * often
            p = sum(torch.softmax(scores[t, row], 0)[i] for t in range(length)) / length
            total = total + f * p
    return total
