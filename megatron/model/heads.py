"""What stands after the last norm: output projections, and the heads that pretrain a BERT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.model.dropout import HiddenDropout
from megatron.model.embedding import divided
from megatron.model.init import table_init, weight_init
from megatron.model.mlp import ACTIVATIONS
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.context import Group
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mappings import reduce_from_tp
from megatron.mpu.partition import Init, InitKind, Partition, set_parameter_metadata
from megatron.mpu.weight_gradients import alias_of
from megatron.ops.attention import soft_capped


class OutputLayer(ColumnParallelLinear):
    """Scores for every token of the vocabulary, [s, b, h] to [s, b, v/tp], without a bias.

    Under sequence parallelism it takes [s/tp, b, h] and still scores the whole sequence.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        init = table_init(config)
        super().__init__(
            config.hidden_size,
            build.vocab.padded,
            ctx=build.ctx,
            bias=False,
            init=init,
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
        )
        self._divisor, self._soft_cap = config.logit_denominator, config.logit_soft_cap
        # Padding rows depend on the layout, so they must not take part in initialisation.
        padded = Init(init.kind, init.std, true_rows=build.vocab.true)
        set_parameter_metadata(self.weight, init=padded, partition=Partition("tp", dim=0))

    def forward(self, hidden: Tensor, *, multiply: bool = True) -> Tensor:
        """Return the scores; with `multiply` false an alias of the weight."""
        return super().forward(hidden) if multiply else alias_of(self.weight)

    def logits(self, carry: Carry) -> Carry:
        """Apply `forward` to a carry, as a layer of the list."""
        scores = self(divided(carry[0], self._divisor))
        return (soft_capped(scores, self._soft_cap), *carry[1:])

    def projection(self, carry: Carry) -> Carry:
        """Map (hidden, ..) to (hidden, weight [v/tp, h], ..), whose product the loss computes."""
        # Through __call__, where hooks wait for weights that are still being gathered.
        hidden = divided(carry[0], self._divisor)
        return (hidden, self(hidden, multiply=False), *carry[1:])


def build_output(config: ModelConfig, build: ModelBuild) -> nn.Module:
    """Return the output projection of a model whose embedding is not tied to it."""
    return OutputLayer(config, build)


class MaskedLMHead(nn.Module):
    """dense, activation, norm: what BERT puts before its output projection (Devlin et al. 2018).

    Every tp rank has all of it; under sequence parallelism it sees its own part of the sequence.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self.dense = Dense(config.hidden_size, config.hidden_size, config, build)
        self._activation = ACTIVATIONS[config.activation]
        self.norm = build_norm(config, build)

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [s, b, h], ..) to the same; under sequence parallelism [s/tp, b, h]."""
        hidden, *others = carry
        return (self.norm(self._activation(self.dense(hidden))), *others)


class VocabularyBias(nn.Module):
    """A number for each token of the vocabulary, [v/tp], added to its scores."""

    def __init__(self, build: ModelBuild) -> None:
        super().__init__()
        rows = build.vocab.padded // build.ctx.tp.size
        self.bias = nn.Parameter(torch.empty(rows, dtype=build.dtype))
        init = Init(InitKind.ZEROS, true_rows=build.vocab.true)
        set_parameter_metadata(self.bias, init=init, partition=Partition("tp", dim=0))

    def forward(self, carry: Carry) -> Carry:
        """Map (scores [s, b, v/tp], ..) to the same."""
        scores, *others = carry
        return (scores + self.bias, *others)


class Pooler(nn.Module):
    """One vector for a row, tanh(dense(first token)); every tp rank computes all of it."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self.dense = Dense(config.hidden_size, config.hidden_size, config, build, whole=True)

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [s, b, h],) to (hidden, pooled [b, h]).

        Under sequence parallelism hidden is [s/tp, b, h].
        """
        hidden = carry[0]
        first = first_token(hidden, self._tp, split=self._split)
        return (hidden, torch.tanh(self.dense(first)))


def first_token(hidden: Tensor, tp: Group, *, split: bool) -> Tensor:
    """Return the hidden states [b, h] of the first token on every tp rank.

    Args:
        hidden: [s, b, h]; [s/tp, b, h] where it is `split`, under sequence parallelism.
    """
    first = hidden[0]
    if not split:
        return first
    # The first token is on the first rank; a sum in which the others are zero shares it. The zeros
    # come from what is there, so that every rank has a backward pass through the layers below and
    # takes part in their communication.
    if not tp.is_first:
        first = first.masked_fill(torch.ones_like(first, dtype=torch.bool), 0.0)
    return reduce_from_tp(first, tp)


class SentenceOrderHead(nn.Module):
    """Whether two segments stand in their order, as two scores (BERT's binary head)."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self.dense = Dense(config.hidden_size, 2, config, build, whole=True)

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden, pooled [b, h]) to (hidden, scores [b, 2])."""
        hidden, pooled = carry
        return (hidden, self.dense(pooled))


class ClassificationHead(nn.Module):
    """Scores of classes for the pooled vector of a row, after dropout."""

    def __init__(self, config: ModelConfig, build: ModelBuild, *, num_classes: int) -> None:
        super().__init__()
        self.dropout = HiddenDropout(config.hidden_dropout, build, "classes", whole=True)
        self.dense = Dense(config.hidden_size, num_classes, config, build, whole=True)

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden, pooled [b, h]) to (scores [b, classes],)."""
        return (self.dense(self.dropout(carry[1])),)


class Dense(nn.Module):
    """x W^T + b with all of W on every tp rank.

    Args:
        whole: what it is applied to is whole on every rank even under sequence parallelism.
    """

    def __init__(
        self,
        width: int,
        rows: int,
        config: ModelConfig,
        build: ModelBuild,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        split = build.sequence_parallel and not whole
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=build.dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=weight_init(config), sequence_parallel=split)
        set_parameter_metadata(self.bias, init=Init(InitKind.ZEROS), sequence_parallel=split)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [.., width] to [.., rows]."""
        return F.linear(hidden, self.weight, self.bias)
