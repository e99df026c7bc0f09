"""Dropout of the hidden states between layers, from the stream that fits who holds them.

Where every tp rank holds them whole, all must drop the same elements. Under sequence parallelism
each rank holds other tokens, and must not repeat for them what another rank drew for its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.random import RandomStreams, StreamName
from megatron.ops.dropout import draw_seed, dropout_add


class HiddenDropout(nn.Module):
    """Dropout drawn from one of the named streams; draws nothing when it is off.

    Args:
        sequence_parallel: every tp rank holds its own part of the sequence.
        fused: one operator drops and adds, and saves no mask; else PyTorch's operations.
    """

    def __init__(
        self,
        probability: float,
        streams: RandomStreams,
        *,
        sequence_parallel: bool,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.probability, self._streams, self._fused = probability, streams, fused
        self._stream: StreamName = "tensor" if sequence_parallel else "replicated"

    def draw_seeds(self, device: torch.device, count: int) -> tuple[Tensor | None, ...]:
        """Return the seeds of the next `count` calls, for compiled code, which draws no numbers."""
        if not (self.training and self.probability > 0):
            return (None,) * count
        with self._streams.fork(self._stream):
            return tuple(draw_seed(device) for _ in range(count))

    def forward(
        self, hidden: Tensor, residual: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor:
        """Zero elements with the probability and scale up the others, in training only.

        Then add the residual, if there is one. The seed is drawn here unless it is given.
        """
        if self.training and self.probability > 0:
            if seed is not None:
                return dropout_add(hidden, residual, self.probability, seed)
            with self._streams.fork(self._stream):
                if self._fused:
                    seed = draw_seed(hidden.device)
                    return dropout_add(hidden, residual, self.probability, seed)
                hidden = F.dropout(hidden, self.probability)
        return hidden if residual is None else residual + hidden

    def extra_repr(self) -> str:
        """Return the probability and the stream, for `print(model)`."""
        return f"{self.probability}, stream={self._stream}"
