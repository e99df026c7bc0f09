"""Dropout of the hidden states between layers: one mask for a token, on whatever rank it is.

The mask is a function of the run's seed, the place in the model, the sample, the token and the
channel, so that every layout drops the same elements.
"""

import torch
from torch import Tensor, nn

from megatron.model.specs import ModelBuild
from megatron.mpu.mappings import sequence_part
from megatron.ops.dropout import add_into, dropout_add, dropout_add_reference


class HiddenDropout(nn.Module):
    """Dropout whose masks have names; draws nothing when it is off.

    Args:
        place: its name in the model, for which no other place draws.
        whole: what it is applied to is [b, h], whole on every rank; else hidden states.
    """

    seed: Tensor

    def __init__(
        self, probability: float, build: ModelBuild, *place: object, whole: bool = False
    ) -> None:
        super().__init__()
        self.probability, self._fused = probability, build.fuse_dropout
        self._place, self._whole = place, whole
        self._streams, self._share, self._tp = build.streams, build.share, build.ctx.tp
        self._split = build.sequence_parallel
        # A tensor, so that one compiled graph serves all layers.
        seed = torch.tensor(self._streams.seed_of("dropout", *place))
        self.register_buffer("seed", seed, persistent=False)

    def numbers_for(self, hidden: Tensor) -> Tensor | None:
        """Return the numbers of the tokens of `hidden`, or None where nothing is dropped.

        For compiled code, and for another place of the same tokens, which have the same numbers.
        """
        if not (self.training and self.probability > 0):
            return None
        if self._whole:
            return self._streams.rows(hidden.shape[0], hidden.device)
        length, batch = hidden.shape[:2]
        key = ("tokens", length, batch, hidden.device)
        return self._streams.once(key, lambda: self._of_tokens(length, batch, hidden.device))

    def forward(
        self, hidden: Tensor, residual: Tensor | None = None, numbers: Tensor | None = None
    ) -> Tensor:
        """Zero elements with the probability and scale up the others, in training only.

        Then add the residual, if there is one. Numbers of tokens are made unless they are given.
        """
        if self.training and self.probability > 0:
            named = self.numbers_for(hidden) if numbers is None else numbers
            assert named is not None  # noqa: S101  # invariant: it drops
            drop = dropout_add if self._fused else dropout_add_reference
            return drop(hidden, residual, self.probability, self.seed, named)
        if residual is None:
            return hidden
        if self._adds_in_place(hidden, residual):
            return add_into(hidden, residual)
        return residual + hidden

    def _adds_in_place(self, hidden: Tensor, residual: Tensor) -> bool:
        if torch.compiler.is_compiling():  # the compiler chooses the memory
            return False
        return self.training and hidden.dtype == residual.dtype and hidden.requires_grad

    def _of_tokens(self, length: int, batch: int, device: torch.device) -> Tensor:
        parts = self._share.size * (self._tp.size if self._split else 1)
        positions = self._share.positions(length * parts, device)
        if self._split:
            positions = positions[sequence_part(len(positions), self._tp)]
        return self._streams.tokens(batch, positions)

    def extra_repr(self) -> str:
        """Return the probability and the place, for `print(model)`."""
        return ", ".join(map(str, (self.probability, *self._place)))
