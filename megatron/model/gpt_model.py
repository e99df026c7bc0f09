"""GPT written down once, as a list; `GPTModel` and `GPTModelPipe` both run slices of that list.

Names of parameters are those of the list, with no prefix for the class that holds them, so one
state dict fits both and every pipeline layout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.device import free_memory_bytes
from megatron.errors import ConfigError, MegatronError
from megatron.model.embedding import Embedding, WordEmbedding
from megatron.model.geometry import AttentionGeometry, CachedAttention, Geometry
from megatron.model.heads import build_output
from megatron.model.losses import LossSum, fused_language_model_loss, language_model_loss
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import (
    LayerWeights,
    PipelineStage,
    around_layers,
    assemble,
    blocks_of,
    run_layers,
)
from megatron.model.transformer import Block, block_layers
from megatron.mpu.stage_plan import LayerRange
from megatron.ops.row_products import RowProducts, row_products

WORD_EMBEDDING = "embedding.word"
_WORD_WEIGHT = f"{WORD_EMBEDDING}.weight"


def gpt_layers(config: ModelConfig, build: ModelBuild) -> tuple[LayerSpec, ...]:
    """Return the layers of a GPT in order: embedding, blocks, final norm, head.

    There are `num_layers` + 3 of them.

    The carry goes in as (tokens [b, s], position_ids [b, s]?, document_ids [b, s]?,
    is_prefix [b, s]?), travels as (hidden [s, b, h], and the same ids), and comes out as (logits
    [s, b, v/tp],). Without position ids tokens stand at 0..s-1; tokens attend only to equal
    document ids, and of those to earlier ones and to all whose `is_prefix` is not 0. Under sequence
    parallelism hidden is [s/tp, b, h] and everything else as without; under context parallelism
    hidden and logits are of the s/cp tokens of this rank. With `build.fuse_loss` there are no
    logits: what comes out is (hidden, weight [v/tp, h]), for `gpt_loss`.

    The geometry is shared by the blocks built from one list: build one list per process.
    """
    if build.fuse_loss and build.loss_state.soft_cap != config.logit_soft_cap:
        raise MegatronError(
            "internal error: a fused loss computes logits with another soft cap than the model",
            found=f"LossState.soft_cap {build.loss_state.soft_cap}, logit_soft_cap "
            f"{config.logit_soft_cap}",
            fix="give both the same, as model_build does",
        )
    geometry = AttentionGeometry(config, build)
    tied = WORD_EMBEDDING if config.tied else None
    call = "projection" if build.fuse_loss else "logits"
    if config.tied:
        # Within one stage this name is already there; on a last stage it is built alone.
        word = partial(WordEmbedding, config, build)
        head = LayerSpec(WORD_EMBEDDING, word, tied=tied, call=call)
    else:
        head = LayerSpec("output", partial(build_output, config, build), call=call)
    return (
        LayerSpec("embedding", partial(Embedding, config, build), tied=tied),
        *block_layers(partial(Block, config, build, geometry), config.num_layers, build),
        LayerSpec("final_norm", partial(build_norm, config, build), call="final"),
        head,
    )


def most_positions(config: ModelConfig, build: ModelBuild) -> int | None:
    """Return the maximum length of a sequence; None when positions are unlimited."""
    if config.position_embedding_type is PositionEmbedding.LEARNED:
        return config.max_position_embeddings or build.seq_length
    return config.max_position_embeddings


class GPTModel(nn.Module):
    """The whole of GPT on one rank (of each tp group), with the loss.

    Stages that are trained are `PipelineStage`s. It returns logits where it is given no labels, so
    its loss is computed from them whatever `build.fuse_loss` is.

    Args:
        prompt_is_prefix: all tokens of a prompt see each other, as in a prefix LM.
        layers: of the list, which a stage that generates text holds; None: all.

    Attributes:
        weights: runs each layer, where parameters are not always in memory; None: they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: ModelBuild,
        *,
        prompt_is_prefix: bool = False,
        layers: LayerRange | None = None,
    ) -> None:
        super().__init__()
        self.config, self.build = config, replace(build, fuse_loss=False)
        self._products: RowProducts | None = None
        self.weights: LayerWeights | None = None
        self.prompt_is_prefix = prompt_is_prefix
        self.specs = gpt_layers(config, self.build)
        self.layer_range = LayerRange(0, len(self.specs)) if layers is None else layers
        assemble(self, self.specs[slice(*self.layer_range)])

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        is_prefix: Tensor | None = None,
    ) -> LossSum | Tensor:
        """Return the loss of [b, s] tokens; without `labels` the logits [s, b, v/tp].

        Args:
            tokens: [b, s] int64.
            position_ids: [b, s] int64; None: 0..s-1 in every row.
            document_ids: [b, s] int64, equal for tokens that may see each other; needs
                `position_ids`, because the caller decides whether they restart.
            labels: [b, s] int64; negative: ignored.
            loss_mask: [b, s], 1 where a token counts; None: all count.
            is_prefix: [b, s], not 0 for tokens that all tokens of their document may see; needs
                `document_ids`.

        Raises:
            ConfigError: this is a stage, whose input and output are hidden states.
        """
        start, stop = self.layer_range
        if self.is_stage:
            raise ConfigError(
                "a stage of a pipeline computes no scores of tokens by itself",
                found=f"layers {start} to {stop - 1} of {len(self.specs)}",
                fix="call generate() on all ranks, or load the model without "
                "--pipeline-model-parallel-size",
            )
        carry = gpt_carry(tokens, position_ids, document_ids, is_prefix)
        (logits,) = self.run(carry)
        if labels is None:
            return logits
        return gpt_loss(self.build, (logits,), labels, loss_mask)

    def run(self, carry: Carry, *, start: int | None = None, stop: int | None = None) -> Carry:
        """Run the layers `specs[start:stop]` on the output of the layer before them."""
        specs = self.specs[start:stop]
        return run_layers(self, specs, carry, around_layers(self.weights, self.specs, start or 0))

    @property
    def has_embedding(self) -> bool:
        """Whether the first layer is here."""
        return self.layer_range.start == 0

    @property
    def has_head(self) -> bool:
        """Whether the last norm and the head are here."""
        return self.layer_range.stop == len(self.specs)

    @property
    def is_stage(self) -> bool:
        """Whether layers are missing here."""
        return not (self.has_embedding and self.has_head)

    @property
    def blocks(self) -> LayerRange:
        """The transformer layers that are here, by their numbers in the model."""
        start, stop = blocks_of(self.specs)
        first, last = max(start, self.layer_range.start), min(stop, self.layer_range.stop)
        return LayerRange(first - start, last - start)

    @property
    def max_length(self) -> int | None:
        """The maximum length of a sequence; None when positions are unlimited."""
        return most_positions(self.config, self.build)

    def row_products(self) -> RowProducts:
        """Return products of all weights of layers whose bits do not depend on the number of rows.

        Of a model without gradients, whose weights do not change, they are kept, with a copy of the
        weights in their order if that fits into a quarter of the free memory; never where some are
        not always in memory.
        """
        is_tied = self.config.tied and self.has_head
        weights = [
            parameter
            for name, parameter in self.named_parameters()
            if parameter.dim() > 1
            and (not name.startswith("embedding.") or (is_tied and name == _WORD_WEIGHT))
        ]
        if any(weight.requires_grad for weight in weights):
            return row_products(weights, pack=False)
        if self._products is None or self._products.are_stale(weights):
            self._products = None  # before the next copy is made
            free, needed = free_memory_bytes(), sum(weight.nbytes for weight in weights)
            has_room = free is None or needed <= free // 4
            self._products = row_products(weights, pack=self.weights is None and has_room)
        return self._products

    @property
    def geometry(self) -> AttentionGeometry:
        """What computes masks and rotations, the same object for all blocks."""
        return next(m.geometry for m in self.modules() if isinstance(m, Block))

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention: CachedAttention,
        before: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [t, h] of tokens after the last block that is here.

        Every token is a sequence of its own to all layers but attention.

        Args:
            tokens: [t] int64, of any sequences.
            positions: [t] int64, of each token in its sequence.
            before: [t, h], of the stage before; None: this is the first one.

        Raises:
            ConfigError: the model was built for sequence parallelism, and one token cannot be
                shared out.
        """
        if self.build.sequence_parallel or self.build.share.size > 1:
            raise ConfigError(
                "a model whose sequences are split over ranks cannot generate token by token",
                found="a model built with sequence_parallel=True"
                if self.build.sequence_parallel
                else f"a model built for {self.build.share.size} context-parallel ranks",
                fix="build it without, from the same checkpoint: weights are split the same way",
            )
        geometry = self.geometry
        with _during_pass(geometry, geometry.cached(positions, attention)):
            carry = gpt_carry(tokens.unsqueeze(1), positions.unsqueeze(1))
            if before is not None:
                carry = (before.unsqueeze(0), *carry[1:])
            stop = min(self.layer_range.stop, len(self.specs) - 2)
            return self.run(carry, start=self.layer_range.start, stop=stop)[0][0]

    def final_states(self, hidden: Tensor) -> Tensor:
        """Return hidden states [n, h] after the last norm, of those before it."""
        return self.run((hidden.unsqueeze(0),), start=-2, stop=-1)[0][0]

    def next_token_logits(self, hidden: Tensor) -> Tensor:
        """Score the tokens that follow those with hidden states [n, h] before the norm: [n, v/tp].

        The head is the widest matrix of all: give it no more tokens than are scored.
        """
        (logits,) = self.run((hidden.unsqueeze(0),), start=-2)
        return logits[0]


@contextmanager
def _during_pass(geometry: AttentionGeometry, of_pass: Geometry) -> Iterator[None]:
    geometry.of_pass = of_pass
    try:
        yield
    finally:
        geometry.of_pass = None


class GPTModelPipe:
    """GPT in the form of a pipeline engine: the same list of layers, and a loss; builds nothing."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        self.build = build
        self.specs: Sequence[LayerSpec] = gpt_layers(config, build)

    def stage(self, *ranges: LayerRange) -> PipelineStage:
        """Build the layers of `ranges`, one per chunk of the stage."""
        return PipelineStage(self.specs, ranges)

    def loss(self, carry: Carry, labels: Tensor, loss_mask: Tensor | None = None) -> LossSum:
        """Return the loss of the last stage's output; labels and mask are [b, s]."""
        return gpt_loss(self.build, carry, labels, loss_mask)


def gpt_carry(
    tokens: Tensor,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    is_prefix: Tensor | None = None,
) -> Carry:
    """Return the input of the first layer; all [b, s].

    Raises:
        ConfigError: document ids without position ids, prefixes without document ids, or prefixes
            of rows of another length.
    """
    if document_ids is None and is_prefix is not None:
        raise ConfigError(
            "prefixes were given without document ids",
            found="is_prefix, and document_ids=None",
            fix="give document_ids too: zeros where each row is one document",
        )
    if is_prefix is not None and is_prefix.shape != tokens.shape:
        raise ConfigError(
            "prefixes are marked in other rows than those of the tokens",
            found=f"is_prefix {list(is_prefix.shape)}, tokens {list(tokens.shape)}",
            fix="mark each token of each row",
        )
    if document_ids is None:
        return (tokens,) if position_ids is None else (tokens, position_ids)
    if position_ids is None:
        raise ConfigError(
            "document ids were given without position ids",
            found="document_ids, and position_ids=None",
            fix="give position_ids too: 0..s-1, or starting again at each document",
        )
    if is_prefix is None:
        return (tokens, position_ids, document_ids)
    return (tokens, position_ids, document_ids, is_prefix)


def gpt_loss(
    build: ModelBuild, carry: Carry, labels: Tensor, loss_mask: Tensor | None = None
) -> LossSum:
    """Return the language-model loss of the last layer's carry; labels and mask are [b, s].

    Under context parallelism it is that of this rank's tokens.
    """
    labels = build.share.take(labels, 1)
    loss_mask = None if loss_mask is None else build.share.take(loss_mask, 1)
    if build.fuse_loss:
        hidden, weight, *_ = carry
        return fused_language_model_loss(
            hidden,
            weight,
            labels,
            loss_mask,
            ctx=build.ctx,
            true_vocab_size=build.vocab.true,
            sequence_parallel=build.sequence_parallel,
            state=build.loss_state,
        )
    return language_model_loss(
        carry[0],
        labels,
        loss_mask,
        ctx=build.ctx,
        true_vocab_size=build.vocab.true,
        state=build.loss_state,
    )
