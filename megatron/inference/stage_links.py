"""What pipeline stages send each other in a step: hidden states to the next one, results to all.

Every rank knows the shapes from the plan of the step, so there are no messages about them. The
results of the last stage go to all stages, because the first one has the rank that draws.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import broadcast
from megatron.mpu.context import ParallelContext
from megatron.pipeline.p2p import GroupExchanger, PipelineMessage

_ABOUT = "hidden states"


class StageLinks:
    """The links of a model's stage on this rank to the other stages; a whole model has none."""

    def __init__(self, model: GPTModel, ctx: ParallelContext) -> None:
        self._model, self._group = model, ctx.pp
        self._exchanger = GroupExchanger(ctx.pp)

    def receive(self, tokens: int) -> Tensor | None:
        """Return the hidden states [t, h] that the stage before sends; None on the first stage.

        Raises:
            PeerError: they did not arrive.
        """
        model = self._model
        if model.has_embedding:
            return None
        room = self._room((tokens, model.config.hidden_size), model.build.stream_dtype)
        before = self._group.rank - 1
        self._exchanger.exchange([PipelineMessage(False, before, (room,), _ABOUT)])
        return room

    def send(self, hidden: Tensor) -> None:
        """Send the hidden states [t, h] of this stage to the next one, if there is one.

        Raises:
            PeerError: they were not received.
        """
        if not self._model.has_head:
            sent, following = hidden.contiguous(), self._group.rank + 1
            self._exchanger.exchange([PipelineMessage(True, following, (sent,), _ABOUT)])

    def from_last(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
        """Return what the last stage computes, on every stage.

        Args:
            shape: of the result, which is of the dtype of the model.
            compute: called on the last stage alone.
        """
        model = self._model
        if not model.is_stage:
            return compute()
        if model.has_head:
            result = compute().contiguous()
        else:
            result = self._room(shape, model.build.dtype)
        return broadcast(result, self._group, source=self._group.size - 1)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=next(self._model.parameters()).device)
