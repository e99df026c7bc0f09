"""Tests of sums of gradients over data-parallel ranks."""

import torch
import torch.distributed as dist
from torch import nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
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
                gradient_dtype=gradient_dtype,
                bucket_elements=bucket_elements,
            )
            for parameter in module.parameters():
                (parameter * (ctx.dp.rank + 1)).sum().backward()
            buffer.all_reduce(ctx.dp)
            for parameter in module.parameters():
                summed = parameter.main_grad
                assert torch.equal(summed, torch.full_like(summed, 6.0))  # 1 + 2 + 3


def test_gradients_are_summed_whatever_the_buckets() -> None:
    run_on_ranks(3, bucket_sizes_give_one_sum)
