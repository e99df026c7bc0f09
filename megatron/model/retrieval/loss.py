"""The loss of a retriever: which of many blocks is the one that a question was taken from.

The blocks are those of one micro-batch on all replicas, so that the number of wrong ones is
--micro-batch-size times the data-parallel size, less one. Two layouts train the same model where
that product is equal; with one micro-batch in a step it is the global batch.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.models.retrieval import RetrievalConfig
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.mappings import gather_from_sequence


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


def biencoder_loss(
    carry: Carry, build: ModelBuild, *, divisor: float = 1.0, ranks: Sequence[int] = ()
) -> LossSum:
    """Return the cross entropy of the right block of each question, among those of all replicas.

    In an evaluation it is [1 + k]: for each of k `ranks` follows for how many questions the right
    block is among so many first ones.

    Args:
        carry: (questions [b, e], blocks [b * m, e]); the first of each m is the right one.
        divisor: see `retrieval_scores`.
    """
    questions, own = carry
    # The gradient of a block is the sum over the replicas whose questions it was compared with.
    blocks = gather_from_sequence(own, build.ctx.dp)
    rows = torch.arange(len(questions), device=own.device)
    right = build.ctx.dp.rank * len(own) + rows * (len(own) // len(questions))
    scores = retrieval_scores(questions, blocks, divisor=divisor)
    # Of ranks that share sequences the first one has the class token, and counts.
    counts = build.ctx.cp.is_first
    total = F.cross_entropy(scores, right, reduction="sum")
    total = total if counts else total * 0
    count = torch.full_like(total, len(questions) if counts else 0)
    if torch.is_grad_enabled() or not ranks:
        return LossSum(total, count)
    better = better_blocks(scores, right)
    hits = [(better < k).sum().to(total.dtype) * counts for k in ranks]
    return LossSum(torch.stack([total, *hits]), count.repeat(1 + len(ranks)))


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
