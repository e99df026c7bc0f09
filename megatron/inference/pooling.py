"""Embeddings of prompts: hidden states that are pooled while their parts are computed.

An embedding has the same bits in whatever parts its prompt comes: states are added in float64, one
after the other.
"""

from enum import StrEnum

import torch
from torch import Tensor

from megatron.errors import NumericsError


class Pooling(StrEnum):
    """What becomes of the last hidden states of a prompt."""

    MEAN = "mean"
    LAST = "last"  # that of the last token


class PooledStates:
    """The states of one prompt, so far."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._pooled: Tensor | None = None  # [h] float64

    def add(self, start: int, hidden: Tensor) -> None:
        """Take the states [n, h] after the last norm from position `start` on; 0 begins anew."""
        states = hidden.to("cpu", torch.float64)
        if self._pooling is Pooling.LAST:
            self._pooled = states[-1]
            return
        if start > 0 and self._pooled is not None:
            states = torch.cat([self._pooled.unsqueeze(0), states])
        self._pooled = states.cumsum(dim=0)[-1]  # adds in order, in which `sum` does not

    def embedding(self) -> tuple[float, ...]:
        """Return the pooled states divided by their length, in float32.

        Raises:
            NumericsError: all of them are zero, so that there is no direction.
        """
        assert self._pooled is not None  # noqa: S101  # invariant: a prompt has one token at least
        norm = self._pooled.norm()
        if not norm > 0:
            raise NumericsError(
                "the embedding of a prompt has no direction",
                found=f"{len(self._pooled)} hidden states, all zero",
                fix="check the weights of the last norm (tools/inspect_checkpoint.py)",
            )
        return tuple((self._pooled / norm).float().tolist())
