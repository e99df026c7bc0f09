"""Two BERTs as one list: the tower of questions, then that of blocks (arXiv 1906.00300).

Both are BERT's own layers under a prefix. What a reader would get wrong: a layer sees the first
tensors of the carry alone; what the other tower needs, or has computed, passes behind them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.errors import ConfigError
from megatron.model.bert_model import bert_carry, bert_encoder
from megatron.model.heads import Dense, first_token
from megatron.model.retrieval.loss import BlockScores, score_divisor
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.mpu.random import RandomStreams

QUERY, CONTEXT = 0, 1  # the number of each text of a sample
_TEXTS = 2
_IDS = 3  # types, positions and padding, behind the tokens


class VectorHead(nn.Module):
    """The state of the class token as the vector of a row, projected where that is asked for."""

    def __init__(self, config: ModelConfig, build: ModelBuild, *, width: int) -> None:
        super().__init__()
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self.projection: Dense | None = None
        if width:
            self.projection = Dense(config.hidden_size, width, config, build, whole=True)

    def forward(self, carry: Carry) -> Carry:
        """Map (hidden [s, b, h], ..) to (.., vectors [b, e]); under SP hidden is [s/tp, b, h]."""
        hidden, *others = carry
        vectors = first_token(hidden, self._tp, split=self._split)
        return (*others, vectors if self.projection is None else self.projection(vectors))


@dataclass(frozen=True, slots=True)
class TowerCall:
    """Calls a layer of a tower with the first tensors of the carry.

    Attributes:
        takes: how many tensors the layer sees.
        text: which text of a sample the tower reads; both have masks of dropout of their own, by
            which a pair of vectors would be recognised otherwise.
    """

    streams: RandomStreams
    takes: int
    text: int

    def __call__(self, layer: Callable[[Carry], Carry], carry: Carry) -> Carry:
        """Return the carry after `layer`."""
        with self.streams.of_text(self.text, _TEXTS):
            return (*layer(carry[: self.takes]), *carry[self.takes :])


def biencoder_layers(
    config: ModelConfig, build: ModelBuild, retrieval: RetrievalConfig
) -> tuple[LayerSpec, ...]:
    """Return both towers and the scores, from `biencoder_carry` to those of `BlockScores`.

    Raises:
        ConfigError: the model has experts.
    """
    divisor = score_divisor(retrieval, config.hidden_size)
    return (
        *tower_layers(config, build, retrieval, text=QUERY),
        *tower_layers(config, build, retrieval, text=CONTEXT),
        LayerSpec("scores", partial(BlockScores, build, divisor=divisor)),
    )


def tower_layers(
    config: ModelConfig, build: ModelBuild, retrieval: RetrievalConfig, *, text: int
) -> tuple[LayerSpec, ...]:
    """Return one tower, from (`bert_carry`, ..) to (.., vectors [b, e]).

    Args:
        text: `QUERY` or `CONTEXT`.

    Raises:
        ConfigError: the model has experts.
    """
    if config.has_experts:
        raise ConfigError(
            "the towers of a retriever have no experts, whose losses count the rows of one text",
            found=f"--num-experts {config.num_experts}",
            fix="leave --num-experts out",
        )
    return tuple(_named(config, build, retrieval, text))


def _named(
    config: ModelConfig, build: ModelBuild, retrieval: RetrievalConfig, text: int
) -> Iterator[LayerSpec]:
    prefix, is_shared = retrieval.towers[text], retrieval.biencoder_shared_query_context_model
    head = partial(VectorHead, config, build, width=retrieval.biencoder_projection_dim)
    takes = 1 + _IDS
    for spec in bert_encoder(config, build):
        name = f"{prefix}.{spec.name}"
        around = TowerCall(build.streams, takes, text)
        yield replace(spec, name=name, tied=name if is_shared else None, around=around)
        takes = _IDS  # hidden states, positions and padding
    name = f"{prefix}.head"
    yield LayerSpec(name, head, tied=name if is_shared else None)


def biencoder_carry(
    questions: Tensor, question_mask: Tensor, blocks: Tensor, block_mask: Tensor
) -> Carry:
    """Return the input of the first layer: that of each tower; all int64 [rows, s].

    Args:
        question_mask: 1 for tokens, 0 for padding; `block_mask` likewise.
    """
    return (*tower_carry(questions, question_mask), *tower_carry(blocks, block_mask))


def tower_carry(tokens: Tensor, padding_mask: Tensor) -> Carry:
    """Return the input of one tower; every token is of the first segment."""
    return bert_carry(tokens, tokens.new_zeros(tokens.shape), padding_mask)
