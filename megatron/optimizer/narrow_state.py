"""Optimizer state stored in fewer bits than updates are computed in.

An update rule needs its state in the dtype of the weights. So state is widened for the weights of
one batch after the other, and rounded back: beside the narrow state there is never more than one
batch of wide state.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BATCH_ELEMENTS = 16_000_000  # a few kernels' worth; their wide state is 128 MiB under AdamW


def step_in_fp32(
    rule: torch.optim.Optimizer,
    weights_and_gradients: Sequence[tuple[Tensor, Tensor]],
    *,
    batch_elements: int = BATCH_ELEMENTS,
) -> None:
    """Make one step of `rule` with its state widened to fp32, then narrowed again.

    The gradients are taken from the pairs; the `grad` of the weights is None afterwards.
    """
    for weight, _ in weights_and_gradients:
        weight.grad = None  # the rule passes by weights without a gradient
    for batch in _batches(weights_and_gradients, batch_elements):
        narrow: list[tuple[dict[str, Tensor], str, Tensor]] = []
        for weight, gradient in batch:
            weight.grad = gradient
            state = rule.state[weight]
            for kind, tensor in state.items():
                if tensor.shape == weight.shape and tensor.dtype != weight.dtype:
                    narrow.append((state, kind, tensor))
                    state[kind] = tensor.to(weight.dtype)
        rule.step()
        for state, kind, tensor in narrow:
            tensor.copy_(state[kind])
            state[kind] = tensor
        for weight, _ in batch:
            weight.grad = None


def _batches(
    pairs: Sequence[tuple[Tensor, Tensor]], batch_elements: int
) -> Iterator[Sequence[tuple[Tensor, Tensor]]]:
    """Yield runs of neighbours, each of at least `batch_elements` but the last."""
    first = elements = 0
    for index, (weight, _) in enumerate(pairs):
        elements += weight.numel()
        if elements >= batch_elements or index == len(pairs) - 1:
            yield pairs[first : index + 1]
            first, elements = index + 1, 0
