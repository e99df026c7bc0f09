"""Tests of which rank counts what; norms over grids are in test_optimizer."""

import torch
from torch import nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Partition
from megatron.mpu.topology import Topology
from megatron.optimizer.clip_grads import owned_by_this_rank
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
