"""Scores and loss of a retriever: which of many blocks is the one that a question is from.

The blocks are those of one micro-batch on all replicas, so that the number of wrong ones is
--micro-batch-size times the data-parallel size, less one. Two layouts train the same model where
that product is equal; with one micro-batch in a step it is the global batch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.models.retrieval import RetrievalConfig
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.mappings import gather_from_sequence

NOTHING = -1  # the right block of a row that counts for nothing


def score_divisor(retrieval: RetrievalConfig, hidden_size: int) -> float:
    """Return what scores are divided by: the root of the hidden size, where that is asked for."""
    return math.sqrt(hidden_size) if retrieval.retriever_score_scaling else 1.0


def retrieval_scores(questions: Tensor, blocks: Tensor, *, divisor: float = 1.0) -> Tensor:
    """Return the inner products [q, n] of vectors [q, e] and [n, e], in fp32 or wider.

    Args:
        divisor: of all scores; see `score_divisor`.
    """
    wide = torch.promote_types(questions.dtype, torch.float32)
    return questions.to(wide) @ blocks.to(wide).t() / divisor


class BlockScores(nn.Module):
    """Compares the questions of this rank with the blocks of all replicas.

    Args:
        divisor: see `retrieval_scores`.
    """

    def __init__(self, build: ModelBuild, *, divisor: float = 1.0) -> None:
        super().__init__()
        self._ctx, self._divisor = build.ctx, divisor

    def forward(self, carry: Carry) -> Carry:
        """Map (questions [b, e], blocks [b * m, e]) to (scores [b, n], the right blocks [b]).

        The first of each m blocks is the right one. Of ranks that share sequences the first one has
        the class token; the others have `NOTHING` for the right blocks.
        """
        questions, own = carry
        # The gradient of a block is the sum over the replicas whose questions it is compared with.
        blocks = gather_from_sequence(own, self._ctx.dp)
        rows = torch.arange(len(questions), device=own.device)
        right = self._ctx.dp.rank * len(own) + rows * (len(own) // len(questions))
        if not self._ctx.cp.is_first:
            right = torch.full_like(right, NOTHING)
        return retrieval_scores(questions, blocks, divisor=self._divisor), right


def biencoder_loss(carry: Carry) -> LossSum:
    """Return the cross entropy of the right block of each question, of `BlockScores`."""
    scores, right = carry
    total = F.cross_entropy(scores, right, reduction="sum", ignore_index=NOTHING)
    return LossSum(total, (right != NOTHING).sum().to(total.dtype))


def accuracy_among(count: int, carry: Carry, labels: Carry) -> LossSum:
    """Return for how many questions the right block is among the first `count`, and of how many."""
    del labels
    scores, right = carry
    asked = right != NOTHING
    hits = (better_blocks(scores[asked], right[asked]) < count).sum()
    return LossSum(hits.to(scores.dtype), asked.sum().to(scores.dtype))


def better_blocks(scores: Tensor, right: Tensor) -> Tensor:
    """Return how many blocks come before the right one of each question: int64 [q].

    Equal scores count in the order of blocks, so that ties favour nobody.

    Args:
        scores: [q, n].
        right: int64 [q].
    """
    own = scores.gather(1, right[:, None])
    places = torch.arange(scores.shape[1], device=scores.device)
    earlier = (scores == own) & (places < right[:, None])
    return ((scores > own) | earlier).sum(1)
