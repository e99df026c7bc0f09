"""From token ids to the residual stream, and from there back to logits when the two are tied."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.model.dropout import HiddenDropout
from megatron.model.init import table_init
from megatron.model.norms import build_norm
from megatron.model.positions import LearnedPositions
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.layers import VocabParallelEmbedding, linear_with_input_reduction
from megatron.mpu.mappings import sequence_part
from megatron.mpu.partition import set_parameter_metadata
from megatron.mpu.weight_gradients import alias_of
from megatron.ops.attention import soft_capped


class WordEmbedding(VocabParallelEmbedding):
    """The table of token vectors, which is also the output projection of a tied model."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__(
            build.vocab.padded,
            config.hidden_size,
            ctx=build.ctx,
            true_size=build.vocab.true,
            init=table_init(config),
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )

        self._divisor, self._soft_cap = config.logit_denominator, config.logit_soft_cap

    def logits(self, carry: Carry) -> Carry:
        """Score every token of this rank's part of the vocabulary: [s, b, h] to [s, b, v/tp].

        Under sequence parallelism the input is [s/tp, b, h].
        """
        hidden = divided(carry[0], self._divisor)
        scores = linear_with_input_reduction(
            hidden, self.weight, None, self._tp, sequence_parallel=self._sequence_parallel
        )
        return (soft_capped(scores, self._soft_cap), *carry[1:])

    def projection(self, carry: Carry) -> Carry:
        """Map (hidden, ..) to (hidden, weight [v/tp, h], ..), whose product the loss computes."""
        # An alias: hooks of engines on what a stage returns must not stay on the parameter.
        return (divided(carry[0], self._divisor), alias_of(self.weight), *carry[1:])


def divided(hidden: Tensor, divisor: float) -> Tensor:
    """Return the operand of an output projection whose logits are to be divided by `divisor`."""
    return hidden if divisor == 1.0 else hidden / divisor


class Embedding(nn.Module):
    """Word vector times a number, norm (optional), learned position (optional), then dropout.

    Args:
        num_tokentypes: kinds of segments that tokens are of, each with a vector of its own (BERT,
            Devlin et al. 2018, figure 2); 0: there are none, and the carry has no types.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, num_tokentypes: int = 0) -> None:
        super().__init__()
        self._build = build
        self.word = WordEmbedding(config, build)
        # Rounded, as Gemma's own releases do: in bfloat16 sqrt(3072) is 55.5.
        factor = torch.tensor(config.embedding_factor, dtype=build.dtype, device="cpu")
        self._multiplier = float(factor)
        self.norm = build_norm(config, build) if config.embed_layernorm else None
        self.position = None
        if config.position_embedding_type is PositionEmbedding.LEARNED:
            self.position = LearnedPositions(
                config.max_position_embeddings or build.seq_length,
                config.hidden_size,
                init=table_init(config),
                sequence_parallel=build.sequence_parallel,
                dtype=build.dtype,
            )
        self.tokentype = None
        if num_tokentypes:
            self.tokentype = TokenTypes(num_tokentypes, config, build)
        self.dropout = HiddenDropout(config.hidden_dropout, build, "embedding")
        self._stream_dtype = build.stream_dtype

    def forward(self, carry: Carry) -> Carry:
        """Embed (tokens, types?, position ids?, documents?), all [b, s], as hidden states.

        What comes out is (hidden [s, b, h], position ids?, documents?). Under sequence parallelism
        hidden is [s/tp, b, h], under context parallelism [s/cp, b, h]; the ids stay whole.
        """
        return self.embed(carry, self.dropout)

    def embed(self, carry: Carry, dropout: HiddenDropout) -> Carry:
        """Return `forward` with another dropout."""
        tokens, *ids = carry
        types = ids.pop(0) if self.tokentype is not None else None
        share, length = self._build.share, tokens.shape[1]
        positions = share.take(ids[0], 1) if ids else None
        if share.size > 1:
            tokens = share.take(tokens, 1)
            types = None if types is None else share.take(types, 1)
            if positions is None:
                positions = share.positions(length, tokens.device).unsqueeze(0)
        # Transposing the ids costs nothing; transposing the vectors would be a copy.
        hidden: Tensor = self.word(tokens.t())  # [s, b, h] or [s/tp, b, h]
        if self._multiplier != 1.0:
            hidden = hidden * self._multiplier
        if self.norm is not None:
            hidden = self.norm(hidden)
        split = self._build.sequence_parallel
        part = sequence_part(tokens.shape[1], self._build.ctx.tp) if split else None
        if self.position is not None:
            hidden = hidden + self.position(length, positions, part)
        if self.tokentype is not None and types is not None:
            hidden = hidden + self.tokentype(types, part)
        return (dropout(hidden).to(self._stream_dtype), *ids)


class TokenTypes(nn.Module):
    """A vector for each kind of segment, the same table on every tp rank."""

    def __init__(self, count: int, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, config.hidden_size, dtype=build.dtype))
        init = table_init(config)
        set_parameter_metadata(self.weight, init=init, sequence_parallel=build.sequence_parallel)

    def forward(self, types: Tensor, part: slice | None) -> Tensor:
        """Return vectors [s, b, h] of int64 types [b, s]; with `part` only of those tokens."""
        return F.embedding(types.t()[part or slice(None)], self.weight)
