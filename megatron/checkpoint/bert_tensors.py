"""Names and shapes of every tensor of a BERT, from its config and its heads.

Like `gpt_tensors` for GPTs; a test compares them with the model itself. One encoder is used with
any of the heads, so a checkpoint of another program may have any of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.checkpoint.gpt_tensors import HEAD, Shapes, gpt_tensors, linear_shapes, norm_shapes
from megatron.config.model import ModelConfig

TOKEN_TYPES = 2  # of the first and of the second segment
TYPE_TABLE = "embedding.tokentype.weight"
WORD_BIAS = "output_bias.bias"
POOLER, ORDER, CLASSES = "pooler.dense", "order_head.dense", "classification_head.dense"
WORDS, WORDS_NORM = "lm_head.dense", "lm_head.norm"


class BertHeads(NamedTuple):
    """What stands above the encoder; `classes` is the number that a classifier scores, or 0."""

    pooler: bool = True
    order: bool = True
    words: bool = True
    classes: int = 0

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "BertHeads":
        """Return the heads present in `shapes`, by global names without `model/`."""
        classes = shapes.get(f"{CLASSES}.weight", (0,))
        return cls(
            pooler=f"{POOLER}.weight" in shapes,
            order=f"{ORDER}.weight" in shapes,
            words=WORD_BIAS in shapes or f"{WORDS}.weight" in shapes,
            classes=classes[0],
        )


def bert_tensors(
    config: ModelConfig, *, vocab_rows: int, positions: int | None, heads: BertHeads
) -> Shapes:
    """Return whole shapes by global name (without `model/`), in the order of the model.

    Args:
        vocab_rows: rows of the vocabulary, without padding.
        positions: rows of a learned position table; for other kinds of positions not read.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in gpt_tensors(config, vocab_rows=vocab_rows, positions=positions).items():
        if name.startswith("layers.") and TYPE_TABLE not in shapes:
            shapes[TYPE_TABLE] = (TOKEN_TYPES, hidden)
        if name != HEAD:
            shapes[name] = shape
    for name, rows in (
        (POOLER, hidden if heads.pooler or heads.order or heads.classes else 0),
        (ORDER, 2 if heads.order else 0),
        (CLASSES, heads.classes),
        (WORDS, hidden if heads.words else 0),
    ):
        if rows:
            shapes |= linear_shapes(name, rows, hidden, bias=True)
    if heads.words:
        shapes |= norm_shapes(WORDS_NORM, hidden, config)
        if not config.tied:
            shapes[HEAD] = (vocab_rows, hidden)
        shapes[WORD_BIAS] = (vocab_rows,)
    return shapes
