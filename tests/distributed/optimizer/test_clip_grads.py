"""Tests of which rank counts what; norms over grids are in test_optimizer."""

import torch
from torch import nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Partition
from megatron.mpu.topology import Topology
from megatron.optimizer.clip_grads import owned_by_this_rank, parameters_norm
from tests.support.ranks import run_on_ranks


def what_is_counted() -> dict[str, bool]:
    """Two stages: both hold the tied embedding, each has a norm of its own."""
    ctx = ParallelContext.build(Topology(tp=2, pp=2))
    split, replicated = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    split.split_by = Partition()
    pairs = [("embedding", split), (f"norm.{ctx.pp.rank}", replicated)]
    return dict(zip([name for name, _ in pairs], owned_by_this_rank(pairs, ctx)))


def test_split_counts_everywhere_replicated_once_and_tied_on_the_first_stage() -> None:
    assert run_on_ranks(4, what_is_counted) == [
        {"embedding": True, "norm.0": True},
        {"embedding": True, "norm.0": False},
        {"embedding": False, "norm.1": True},
        {"embedding": False, "norm.1": False},
    ]


def norm_of_shares() -> float:
    """Two replicas that share a weight of three and four out, and both hold a bias of twelve."""
    ctx = ParallelContext.build(Topology(dp=2))
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    bias = nn.Parameter(torch.tensor([12.0]), requires_grad=False)

    def share(parameter: nn.Parameter) -> torch.Tensor:
        return parameter.detach()[ctx.dp.rank :][:1] if parameter is weight else bias.detach()

    return parameters_norm([("weight", weight), ("bias", bias)], ctx, share)


def test_the_norm_of_parameters_counts_each_once() -> None:
    assert run_on_ranks(2, norm_of_shares) == [13.0, 13.0]
