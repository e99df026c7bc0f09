"""From token ids to the residual stream, and from there back to logits when the two are tied."""

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.model.dropout import HiddenDropout
from megatron.model.init import weight_init
from megatron.model.norms import build_norm
from megatron.model.positions import LearnedPositions
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.layers import VocabParallelEmbedding, linear_with_input_reduction
from megatron.mpu.mappings import sequence_part


class WordEmbedding(VocabParallelEmbedding):
    """The table of token vectors, which is also the output projection of a tied model."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__(
            build.vocab.padded,
            config.hidden_size,
            ctx=build.ctx,
            true_size=build.vocab.true,
            init=weight_init(config),
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )

    def logits(self, carry: Carry) -> Carry:
        """Score every token of this rank's vocabulary: [s, b, h] to [s, b, v/tp].

        Under sequence parallelism the input is [s/tp, b, h].
        """
        scores = linear_with_input_reduction(
            carry[0], self.weight, None, self._tp, sequence_parallel=self._sequence_parallel
        )
        return (scores,)


class Embedding(nn.Module):
    """Word vector, its norm if asked for, plus the learned position if there is one, dropout."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._build = build
        self.word = WordEmbedding(config, build)
        self.norm = build_norm(config, build) if config.embed_layernorm else None
        self.position = None
        if config.position_embedding_type is PositionEmbedding.LEARNED:
            self.position = LearnedPositions(
                config.max_position_embeddings or build.seq_length,
                config.hidden_size,
                init=weight_init(config),
                sequence_parallel=build.sequence_parallel,
                dtype=build.dtype,
            )
        self.dropout = HiddenDropout(
            config.hidden_dropout, build.streams, sequence_parallel=build.sequence_parallel
        )
        wide = build.precision.fp32_residual_connection
        self._stream_dtype = torch.float32 if wide else build.dtype

    def forward(self, carry: Carry) -> Carry:
        """(tokens [b, s], position ids [b, s]?, documents [b, s]?) to (hidden [s, b, h], ids..).

        Under sequence parallelism hidden is [s/tp, b, h]; the ids stay whole.
        """
        tokens, *ids = carry
        # Transposing the ids costs nothing; transposing what they look up would be a copy.
        hidden: Tensor = self.word(tokens.t())  # [s, b, h] or [s/tp, b, h]
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.position is not None:
            length = tokens.shape[1]
            split = self._build.sequence_parallel
            part = sequence_part(length, self._build.ctx.tp) if split else None
            hidden = hidden + self.position(length, ids[0] if ids else None, part)
        return (self.dropout(hidden).to(self._stream_dtype), *ids)
