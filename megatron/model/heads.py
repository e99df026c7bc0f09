"""The output projection of a model whose embedding is not tied to it."""

from torch import nn

from megatron.config.model import ModelConfig
from megatron.model.init import weight_init
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.partition import Init, Partition, describe


class OutputLayer(ColumnParallelLinear):
    """Scores for every token of the vocabulary, [s, b, h] to [s, b, v/tp], without a bias.

    Under sequence parallelism it takes [s/tp, b, h] and still scores the whole sequence.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        init = weight_init(config)
        super().__init__(
            config.hidden_size,
            build.vocab.padded,
            ctx=build.ctx,
            bias=False,
            init=init,
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )
        # Padding rows depend on the layout, so they must not take part in initialisation.
        padded = Init(init.kind, init.std, true_rows=build.vocab.true)
        describe(self.weight, init=padded, partition=Partition("tp", dim=0))

    def logits(self, carry: Carry) -> Carry:
        """The same on a carry, as a layer of the list."""
        return (self(carry[0]),)


def build_output(config: ModelConfig, build: ModelBuild) -> nn.Module:
    """The untied head of a GPT."""
    return OutputLayer(config, build)
