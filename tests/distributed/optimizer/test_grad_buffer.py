"""Tests of sums of gradients over data-parallel ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.optimizer.buckets import owned_ranges
from megatron.optimizer.grad_buffer import GradBuffer
from tests.support.ranks import run_on_ranks


def bucket_sizes_give_one_sum() -> None:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    for dtype, gradient_dtype in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
    ):
        for bucket_elements in (1, 100, 10**9):
            module = nn.Sequential(nn.Linear(5, 30), nn.Linear(30, 3)).to(dtype)
            buffer = GradBuffer(
                module.named_parameters(),
                ctx.replicas,
                gradient_dtype=gradient_dtype,
                bucket_elements=bucket_elements,
            )
            for parameter in module.parameters():
                (parameter * (ctx.dp.rank + 1)).sum().backward()
            buffer.finish()
            for parameter in module.parameters():
                summed = parameter.main_grad
                assert torch.equal(summed, torch.full_like(summed, 6.0))  # 1 + 2 + 3


def test_gradients_are_summed_whatever_the_buckets() -> None:
    run_on_ranks(3, bucket_sizes_give_one_sum)


def overlap_changes_no_bit() -> None:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    for dtype, gradient_dtype in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        sums = [
            reduced(ctx, dtype, gradient_dtype, overlap=overlap, sharded=sharded)
            for overlap in (False, True)
            for sharded in (False, True)
        ]
        for other in sums[1:]:
            assert all(map(torch.equal, other, sums[0]))


def reduced(
    ctx: ParallelContext,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    *,
    overlap: bool,
    sharded: bool,
) -> list[Tensor]:
    """The gradients of two steps that this rank owns, whatever of the rest it has."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(30, 30) for _ in range(4))).to(dtype)
    vars(module[1].weight)["reduce_first"] = True
    buffer = GradBuffer(
        module.named_parameters(),
        ctx.replicas,
        gradient_dtype=gradient_dtype,
        bucket_elements=500,
        overlap=overlap,
        sharded=sharded,
    )
    (flat,) = buffer.flats
    owned = owned_ranges(flat.plan, ctx.dp.rank, ctx.dp.size)
    found = []
    generator = torch.Generator().manual_seed(ctx.dp.rank)
    for _ in range(2):
        buffer.start_step(3)
        for _ in range(3):
            module(torch.randn(2, 30, generator=generator).to(dtype)).square().sum().backward()
        early = buffer._started
        assert early == (3 if overlap else 0)  # of four buckets, one of them held
        buffer.finish(partial(module[1].weight.main_grad.mul_, 2.0))
        for parameter, (start, stop) in zip(flat.parameters, owned, strict=True):
            found.append(parameter.main_grad.flatten()[start:stop].clone())
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_overlap_and_sharding_change_no_bit_of_the_sums(world_size: int) -> None:
    run_on_ranks(world_size, overlap_changes_no_bit)
