"""What keeps the experts of a layer equally busy: losses of a router, and a balanced choice.

`seq_aux_loss` looks at each sequence by itself. Others look at the tokens of a micro-batch
together, or at those of all replicas in all micro-batches so far: then results depend on the
layout, as they do in Megatron-LM, whose names these are.
"""

import torch
from torch import Tensor

from megatron import device
from megatron.config.experts import LoadBalancing
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group

SINKHORN_CHANGE = "change of the factors of Sinkhorn's iteration"  # what the host has to know
_TOLERANCE = 1e-4  # Megatron-LM's, of the mean change; relative for factors above 1


class BusyExperts:
    """How often a balancing loss takes the experts to be chosen in each of its sequences."""

    def __init__(self, kind: LoadBalancing, replicas: Group) -> None:
        self._kind, self._replicas = kind, replicas
        self._seen: Tensor | None = None  # [experts], by all replicas
        self._sequences = 0

    def of(self, counts: Tensor) -> Tensor:
        """Return the counts of each sequence, [b, experts], or their mean over several for each.

        `aux_loss` takes the mean over the micro-batch (Switch, arXiv 2101.03961, eq. 4 to 6),
        `global_aux_loss` that over all sequences since `forget`, of all replicas (Qiu et al. 2025,
        arXiv 2501.11873, section 3).
        """
        if self._kind is LoadBalancing.SEQ_AUX_LOSS:
            return counts
        batch, mixed = counts.shape[0], counts.sum(dim=0)
        if self._kind is LoadBalancing.GLOBAL_AUX_LOSS:
            mixed = all_reduce(mixed, self._replicas)
            mixed = mixed if self._seen is None else self._seen + mixed
            self._seen, self._sequences = mixed, self._sequences + batch * self._replicas.size
            batch = self._sequences
        return (mixed / batch).expand_as(counts)

    def forget(self) -> None:
        """Begin another step."""
        self._seen, self._sequences = None, 0


@torch.no_grad()
def sinkhorn(scores: Tensor) -> Tensor:
    """Return exp(scores) scaled so that tokens sum up alike, and experts do: [tokens, experts].

    Rows then sum up to 1 / tokens and columns, but for the last step of the iteration, to
    1 / experts (Cuturi 2013, arXiv 1306.0895, alg. 1; BASE layers, arXiv 2103.16716, balance by
    such an assignment). An accelerator waits for the host in each of some ten iterations.
    """
    tokens, experts = scores.shape
    # A factor of each token is scaled away, and without it nothing overflows.
    cost = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    of_experts = torch.ones_like(scores[0])
    least = torch.finfo(scores.dtype).tiny  # an expert far below all others has a sum of zero
    while True:
        of_tokens = 1.0 / (tokens * (cost @ of_experts))
        before, of_experts = of_experts, 1.0 / (experts * (of_tokens @ cost).clamp(min=least))
        change = ((before - of_experts) / of_experts.clamp(min=1.0)).abs().mean()
        # Scores that are not a number end it as well.
        if not float(device.values_for_host(change, SINKHORN_CHANGE)) > _TOLERANCE:
            return of_tokens[:, None] * cost * of_experts


def balance_loss(scores: Tensor, busy: Tensor, length: int, taken: int) -> Tensor:
    """Return the sum over sequences of sum_i f_i P_i; each is 1 if balanced.

    Its maximum is the number of experts over the number taken.

    DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20): f_i is how often expert i was taken over how often
    it would be if all were alike, P_i its mean probability, the softmax over `scores`.

    Args:
        scores: [s, b, experts], or logs of their sigmoids; a part of the sequences gives a summand.
        busy: [b, experts], of whole sequences.
        length: tokens of a whole sequence.
    """
    often = busy * (scores.shape[-1] / (taken * length))
    likely = torch.softmax(scores, dim=-1).sum(dim=0) / length
    return (often * likely).sum()


def z_loss(scores: Tensor, length: int) -> Tensor:
    """Return the sum over sequences of the mean square of log sum exp of a token's scores.

    ST-MoE (Zoph et al. 2022, arXiv 2202.08906, eq. 5).
    """
    return torch.logsumexp(scores, dim=-1).square().sum() / length
