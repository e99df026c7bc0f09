"""Attention of a decoder's tokens to those of an encoder, and the decoder block that has it."""

from collections.abc import Callable

from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.model.attention import HeadAttention
from megatron.model.dropout import HiddenDropout
from megatron.model.encoder_decoder.geometry import StackGeometry, encoder_mask
from megatron.model.geometry import Geometry
from megatron.model.norms import build_head_norm
from megatron.model.specs import Carry, ModelBuild
from megatron.model.transformer import Block, norms_of_branch
from megatron.mpu.partition import set_row_runs


class CrossAttention(HeadAttention):
    """Queries of one sequence, keys and values of another (Vaswani et al. 2017, section 3.2.3).

    Nothing is known of positions: neither rotation nor biases. Rows of the key/value matrix stand
    group by group, [k v] per query group, so that an even split gives each tp rank whole groups.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, layer: int) -> None:
        super().__init__(config, build, layer=layer, place="cross attention")
        heads, groups, width = config.num_attention_heads, config.query_groups, config.head_width
        self.query = self._projection(config, build, heads * width)
        self.key_value = self._projection(config, build, 2 * groups * width)
        set_row_runs(self.key_value.weight, (width, width))
        self.query_norm = self.key_norm = None
        if config.qk_layernorm:
            self.query_norm = build_head_norm(config, build, heads=heads)
            self.key_norm = build_head_norm(config, build, heads=groups)
        self.output = self._output(config, build)

    def forward(self, hidden: Tensor, memory: Tensor, geometry: Geometry) -> Tensor:
        """Apply attention of `hidden` [d, b, h] to `memory` [s, b, h]: [d, b, h].

        Under sequence parallelism they are [d/tp, b, h] and [s/tp, b, h].
        """
        keys, values = self.keys_and_values(memory)
        return self.attend(hidden, keys, values, geometry)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of `memory` [s, b, h]: [s, b, g/tp, 1, d] each."""
        projected = self.key_value(memory)
        grouped = projected.view(*projected.shape[:-1], self._groups, 2, self._width)
        keys, values = grouped.split((1, 1), dim=3)
        return (keys if self.key_norm is None else self.key_norm(keys)), values

    def attend(self, hidden: Tensor, keys: Tensor, values: Tensor, geometry: Geometry) -> Tensor:
        """Return `forward` for keys and values of `keys_and_values`."""
        projected = self.query(hidden)
        queries = projected.view(*projected.shape[:-1], self._groups, self._queries, self._width)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        if self._query_factor != 1.0:
            queries = queries * self._query_factor
        output: Tensor = self.output(self._context(queries, keys, values, geometry))
        return output


class DecoderBlock(Block):
    """A block with attention to an encoder's output between its own attention and its MLP."""

    def __init__(
        self, config: ModelConfig, build: ModelBuild, geometry: StackGeometry, *, layer: int
    ) -> None:
        super().__init__(config, build, geometry, layer=layer, place="decoder ")
        build = self._build
        self.cross_norm, self.cross_output_norm = norms_of_branch(config, build)
        self.cross_attention = CrossAttention(config, build, layer=layer)
        self.cross_dropout = HiddenDropout(
            config.hidden_dropout, build, "decoder layer", layer, "cross attention"
        )

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [d, b, h], memory [s, b, h], padding mask [b, s], table?) to the same, later.

        Under sequence parallelism hidden is [d/tp, b, h] and memory [s/tp, b, h].
        """
        hidden, memory, padding_mask, *_ = carry
        geometry = self.geometry.of_carry(hidden, carry[1:])
        seen = encoder_mask(padding_mask)
        numbers = self.attention_dropout.numbers_for(hidden)
        later = self._run(DecoderBlock._attend_across, hidden, geometry, numbers, memory, seen)
        return (later, *carry[1:])

    def _attend_across(
        self,
        hidden: Tensor,
        geometry: Geometry,
        numbers: Tensor | None,
        memory: Tensor,
        seen: Geometry,
    ) -> Tensor:
        return self.run(hidden, geometry, lambda x: self.cross_attention(x, memory, seen), numbers)

    def run(
        self,
        hidden: Tensor,
        geometry: Geometry,
        cross: Callable[[Tensor], Tensor],
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states one layer later; `cross` attends to the encoder's output.

        Args:
            numbers: of the tokens, for dropout; None where nothing is dropped.
        """
        after = self._after_attention(hidden, geometry, numbers)
        result, residual = self._branch(self.cross_norm, cross, after, after)
        result = self._finished(result, self.cross_output_norm)
        crossed: Tensor = self.cross_dropout(result, residual, numbers)
        return self._after_mlp(crossed, crossed, numbers)
