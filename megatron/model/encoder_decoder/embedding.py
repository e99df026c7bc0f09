"""One embedding for the tokens of an encoder and of its decoder."""

from megatron.config.model import ModelConfig
from megatron.model.dropout import HiddenDropout
from megatron.model.embedding import Embedding
from megatron.model.specs import Carry, ModelBuild


class SharedEmbedding(Embedding):
    """The same tables for both stacks, as in T5 and in Megatron's; what is dropped differs."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__(config, build)
        self.decoder_dropout = HiddenDropout(config.hidden_dropout, build, "decoder embedding")

    def encoder(self, carry: Carry) -> Carry:
        """Map (tokens [b, s], padding mask, decoder tokens) to (hidden [s, b, h], the others).

        Under sequence parallelism hidden is [s/tp, b, h].
        """
        tokens, *others = carry
        return (*self((tokens,)), *others)

    def decoder(self, carry: Carry) -> Carry:
        """Map (memory, padding mask, decoder tokens [b, d]) to (hidden [d, b, h], memory, mask).

        Under sequence parallelism hidden is [d/tp, b, h].
        """
        memory, padding_mask, tokens = carry
        return (*self.embed((tokens,), self.decoder_dropout), memory, padding_mask)
