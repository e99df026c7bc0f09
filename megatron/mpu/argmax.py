"""The likeliest token where the vocabulary is split over the tensor-parallel ranks."""

import torch
from torch import Tensor

from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, *, ctx: ParallelContext, true_vocab_size: int) -> Tensor:
    """Return the id with the largest score, the lowest of several, of [.., v/tp]: int64 [..].

    Equal on all tp ranks. Padding columns, at or beyond the true vocabulary, are never chosen.
    """
    tp, width = ctx.tp, logits.shape[-1]
    start = tp.rank * width
    here = min(max(true_vocab_size - start, 0), width)
    scores = torch.full(logits.shape[:-1], -torch.inf, dtype=logits.dtype, device=logits.device)
    ids = torch.full(logits.shape[:-1], true_vocab_size, device=logits.device)
    if here:
        scores, ids = logits[..., :here].max(dim=-1)
        ids = ids + start
    best = all_reduce(scores.clone(), tp, op="max")
    # Ranks that are not the best name an id beyond all others.
    return all_reduce(torch.where(scores == best, ids, true_vocab_size), tp, op="min")
