"""Masks and biases of an encoder, of a decoder, and of what a decoder sees of an encoder.

Beside hidden states a carry has other tensors here than that of one stack, so each stack reads its
own. Padding is a document of its own, so that no row of a mask is empty.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.encoder_decoder.relative_positions import RelativeBias
from megatron.model.geometry import AttentionGeometry, Geometry
from megatron.model.specs import ModelBuild


class StackGeometry(AttentionGeometry):
    """The geometry of one stack, with the biases of its table of relative positions.

    Args:
        causal: of the decoder; in the encoder every token sees all of its row but padding.
    """

    has_table = True

    def __init__(
        self,
        config: ModelConfig,
        build: ModelBuild,
        decoder: EncoderDecoderConfig,
        *,
        causal: bool,
    ) -> None:
        super().__init__(config, build, causal=causal)
        self._bias_of: RelativeBias | None = None
        if config.position_embedding_type is PositionEmbedding.RELATIVE:
            self._bias_of = RelativeBias(decoder, both_directions=not causal)

    def of_carry(self, hidden: Tensor, ids: Sequence[Tensor]) -> Geometry:
        """Return the geometry of hidden states [s, b, h].

        Args:
            ids: what stands behind them. Of the encoder (padding mask [b, s], decoder tokens,
                table?), of the decoder (encoder output, padding mask, table?).
        """
        padding = None if self._causal else ids[0]
        geometry = self.of(hidden, None, padding)
        if self._bias_of is None:
            return geometry
        length = hidden.shape[0] * self._parts
        bias = self._bias_of.bias(ids[2], length)
        mask = _biased(bias, geometry.mask, geometry.causal)
        wide = None if geometry.wide_mask is None else _biased(bias, geometry.wide_mask, False)
        return replace(geometry, mask=mask, wide_mask=wide)


def _biased(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return a mask of numbers: the bias where a token may attend, else -inf."""
    if mask is None and causal:
        mask = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril()
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def encoder_mask(padding_mask: Tensor) -> Geometry:
    """Return what a decoder sees of rows of an encoder: all but padding.

    Args:
        padding_mask: [b, s], 1 for tokens and 0 for padding; a row has one token at least.
    """
    mask = (padding_mask != 0)[:, None, None]  # [b, 1, 1, s]
    return Geometry(mask=mask, wide_mask=mask, causal=False)
