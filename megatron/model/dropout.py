"""Dropout on tensors that every tp rank holds whole: all of them must drop the same elements."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.random import RandomStreams


class ReplicatedDropout(nn.Module):
    """Dropout drawn from the stream that is equal over tp; nothing is drawn when it is off."""

    def __init__(self, probability: float, streams: RandomStreams) -> None:
        super().__init__()
        self.probability, self._streams = probability, streams

    def forward(self, hidden: Tensor) -> Tensor:
        """Zero elements with the probability and scale up the others, in training only."""
        if not self.training or self.probability == 0:
            return hidden
        with self._streams.fork("replicated"):
            return F.dropout(hidden, self.probability)

    def extra_repr(self) -> str:
        """The probability, for `print(model)`."""
        return f"{self.probability}"
