"""Dropout of the hidden states between layers, from the stream that fits who holds them.

Where every tp rank holds them whole, all must drop the same elements. Under sequence parallelism
each rank holds other tokens, and must not repeat for them what another rank drew for its own.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.random import RandomStreams, StreamName


class HiddenDropout(nn.Module):
    """Dropout drawn from one of the named streams; draws nothing when it is off.

    Args:
        sequence_parallel: every tp rank holds its own part of the sequence.
    """

    def __init__(
        self, probability: float, streams: RandomStreams, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.probability, self._streams = probability, streams
        self._stream: StreamName = "tensor" if sequence_parallel else "replicated"

    def forward(self, hidden: Tensor) -> Tensor:
        """Zero elements with the probability and scale up the others, in training only."""
        if not self.training or self.probability == 0:
            return hidden
        with self._streams.fork(self._stream):
            return F.dropout(hidden, self.probability)

    def extra_repr(self) -> str:
        """Return the probability and the stream, for `print(model)`."""
        return f"{self.probability}, stream={self._stream}"
