"""BERT written down once, as a list; `BertModel` and every pipeline stage run slices of that list.

What a reader would get wrong: with `--apply-residual-connection-post-layernorm` this is the network
of Devlin et al. 2018 with its norms after each addition, of which each stands here at the beginning
of what follows it: that of the embedding is `layers.0.input_norm`, the last one `final_norm`.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.model.embedding import Embedding, WordEmbedding
from megatron.model.geometry import AttentionGeometry
from megatron.model.gpt_model import WORD_EMBEDDING
from megatron.model.heads import (
    ClassificationHead,
    MaskedLMHead,
    Pooler,
    SentenceOrderHead,
    VocabularyBias,
    build_output,
)
from megatron.model.losses import LossSum, language_model_loss
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import assemble, run_layers
from megatron.model.transformer import Block, block_layers

NUM_TOKENTYPES = 2  # of the first and of the second segment
IGNORED = -1  # the label of a token that is not to be guessed


def bert_layers(
    config: ModelConfig, build: ModelBuild, *, order_head: bool = True
) -> tuple[LayerSpec, ...]:
    """Return the whole of BERT, in order: embedding, blocks, final norm, heads.

    The carry goes in as `bert_carry` makes it and comes out as (word scores [s, b, v/tp], order
    scores [b, 2]?). Every token attends to all tokens of its row but padding.

    Args:
        order_head: also guess whether the two segments are in their order.
    """
    tied = WORD_EMBEDDING if config.tied else None
    if config.tied:
        word = partial(WordEmbedding, config, build)
        scores = LayerSpec(WORD_EMBEDDING, word, tied=tied, call="logits")
    else:
        scores = LayerSpec("output", partial(build_output, config, build), call="logits")
    order = (
        LayerSpec("pooler", partial(Pooler, config, build)),
        LayerSpec("order_head", partial(SentenceOrderHead, config, build)),
    )
    return (
        *bert_encoder(config, build, tied=tied),
        *(order if order_head else ()),
        LayerSpec("lm_head", partial(MaskedLMHead, config, build)),
        scores,
        LayerSpec("output_bias", partial(VocabularyBias, build)),
    )


def classification_layers(
    config: ModelConfig, build: ModelBuild, *, num_classes: int
) -> tuple[LayerSpec, ...]:
    """Return a BERT that scores rows: from `bert_carry` to (scores [b, classes],).

    All but the last layer have the names that they have in a pretrained BERT with an order head.
    """
    head = partial(ClassificationHead, config, build, num_classes=num_classes)
    return (
        *bert_encoder(config, build),
        LayerSpec("pooler", partial(Pooler, config, build)),
        LayerSpec("classification_head", head),
    )


def bert_encoder(
    config: ModelConfig, build: ModelBuild, *, tied: str | None = None
) -> tuple[LayerSpec, ...]:
    """Return embedding, blocks and final norm, from `bert_carry` to (hidden [s, b, h],).

    Every token attends to all tokens of its row but padding.

    Args:
        tied: the name of the weights that the embedding shares with a later layer.
    """
    geometry = AttentionGeometry(config, build, causal=False)
    embedding = partial(Embedding, config, build, num_tokentypes=NUM_TOKENTYPES)
    return (
        LayerSpec("embedding", embedding, tied=tied),
        *block_layers(partial(Block, config, build, geometry), config.num_layers, build),
        LayerSpec("final_norm", partial(build_norm, config, build), call="final"),
    )


def bert_carry(tokens: Tensor, types: Tensor, padding_mask: Tensor) -> Carry:
    """Return the input of the first layer; all int64 [b, s].

    Args:
        types: 0 for tokens of the first segment, 1 for those of the second.
        padding_mask: 1 for tokens, 0 for what fills the row up.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    # Padding is a separate document: no token attends to it, and no row of a mask is empty.
    return (tokens, types, positions.contiguous(), padding_mask)


def bert_loss(
    build: ModelBuild,
    carry: Carry,
    labels: Tensor,
    loss_mask: Tensor,
    swapped: Tensor | None = None,
) -> LossSum:
    """Return the losses of the masked words and of the order of segments, as [2].

    Under context parallelism the words are those of this rank, and the first one counts the order.

    Args:
        labels: [b, s] int64, of tokens that `loss_mask` [b, s] counts.
        swapped: [b] int64, 1 where the segments are not in their order; for an order head.
    """
    words = language_model_loss(
        carry[0],
        build.share.take(labels, 1),
        build.share.take(loss_mask, 1),
        ctx=build.ctx,
        true_vocab_size=build.vocab.true,
        state=build.loss_state,
    )
    if swapped is None or len(carry) == 1:
        return words
    scores = carry[1].to(torch.promote_types(carry[1].dtype, torch.float32))
    order = F.cross_entropy(scores, swapped, reduction="sum").to(words.total.dtype)
    # The first token, of which the scores are made, is on the first rank that shares the sequence.
    counts = build.ctx.cp.is_first
    order = order if counts else order * 0
    rows = torch.full_like(words.count, len(swapped) if counts else 0)
    return LossSum(torch.stack([words.total, order]), torch.stack([words.count, rows]))


class BertModel(nn.Module):
    """The whole of BERT on one rank (of each tp group), with the losses."""

    def __init__(self, config: ModelConfig, build: ModelBuild, *, order_head: bool = True) -> None:
        super().__init__()
        self.config, self.build = config, build
        self.specs: Sequence[LayerSpec] = bert_layers(config, build, order_head=order_head)
        assemble(self, self.specs)

    def forward(
        self,
        tokens: Tensor,
        types: Tensor,
        padding_mask: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        swapped: Tensor | None = None,
    ) -> LossSum | Carry:
        """Return the losses against `labels`; without labels the word and order scores.

        Without labels the result is (word scores [s, b, v/tp], order scores?).

        See `bert_carry` and `bert_loss` for the arguments.
        """
        carry = run_layers(self, self.specs, bert_carry(tokens, types, padding_mask))
        if labels is None:
            return carry
        counted = labels >= 0 if loss_mask is None else loss_mask
        return bert_loss(self.build, carry, labels, counted, swapped)

    def hidden_states(self, tokens: Tensor, types: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the input of the heads: [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        last = next(i for i, spec in enumerate(self.specs) if spec.name == "final_norm")
        carry = bert_carry(tokens, types, padding_mask)
        return run_layers(self, self.specs[: last + 1], carry)[0]
