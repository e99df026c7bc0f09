"""What pipeline stages send each other in a step: hidden states to the next one, results back.

Every rank knows the shapes from the plan of the step, so there are no messages about them. The
results of the last stage go to all stages, or to the one rank that draws. What goes to one rank is
sent while the sender computes on: it waits for none but those long before.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import broadcast
from megatron.mpu.context import ParallelContext
from megatron.pipeline.p2p import GroupExchanger, MessagesUnderWay, PipelineMessage

_ABOUT, _RESULTS = "hidden states", "results of a step"


class StageLinks:
    """The links of a model's stage on this rank to the other stages; a whole model has none."""

    def __init__(self, model: GPTModel, ctx: ParallelContext) -> None:
        self._model, self._group, self._ctx = model, ctx.pp, ctx
        self._exchanger = GroupExchanger(ctx.pp)
        self._sent: deque[MessagesUnderWay] = deque()
        # More than steps in flight (one for each stage): hidden states that are older have arrived,
        # so only the last stage ever waits, and for a rank that does not wait for it.
        self._most_sent = 2 * ctx.pp.size

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
        """Begin to send the hidden states [t, h] of this stage to the next one, if there is one.

        Raises:
            PeerError: those of an earlier step were not received.
        """
        if not self._model.has_head:
            self._send(hidden, self._group.rank + 1, _ABOUT)

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

    def to_first(self, shape: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor | None:
        """Return what the last stage computes on the first rank of the model; None on all others.

        Arguments as of `from_last`; without stages every rank computes and returns it.

        Raises:
            PeerError: it did not arrive.
        """
        model = self._model
        if not model.is_stage:
            return compute()
        leads = self._group.ranks[0] == self._ctx.whole_model.ranks[0]
        if model.has_head:
            result = compute()
            if leads:
                self._send(result, 0, _RESULTS)
        elif leads and self._group.is_first:
            room, last = self._room(shape, model.build.dtype), self._group.size - 1
            self._exchanger.exchange([PipelineMessage(False, last, (room,), _RESULTS)])
            return room
        return None

    def end_step(self) -> None:
        """Take part in the end of a step that has no results: the first rank of the model waits.

        Raises:
            PeerError: a stage did not come to its end.
        """
        if self._model.is_stage:
            self.to_first((1,), lambda: self._room((1,), self._model.build.dtype).zero_())

    def _send(self, tensor: Tensor, stage: int, about: str) -> None:
        message = PipelineMessage(True, stage, (tensor.contiguous(),), about)
        self._sent.append(self._exchanger.start([message]))
        while len(self._sent) > self._most_sent:
            self._sent.popleft().wait()

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=next(self._model.parameters()).device)
