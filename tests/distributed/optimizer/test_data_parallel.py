"""Tests of data parallelism over several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.errors import NumericsError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.optimizer.data_parallel import DistributedDataParallel
from tests.support.ranks import run_on_ranks

# float64: the same products summed in another order
FP64_ROUNDING = 1e-13


def ragged_batches_equal_one_batch() -> None:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(5, 2).double(), ctx.replicas)
    inputs = torch.randn(10, 5, dtype=torch.float64)
    own = [slice(0, 1), slice(1, 10)][ctx.dp.rank]
    for sample in inputs[own]:
        ddp(sample).square().sum().backward()
    ddp.finish()
    plain = nn.Linear(5, 2).double()
    plain.load_state_dict(ddp.module.state_dict())
    plain(inputs).square().sum().backward()
    for ours, reference in zip(ddp.module.parameters(), plain.parameters()):
        torch.testing.assert_close(
            ours.main_grad, reference.grad, rtol=FP64_ROUNDING, atol=FP64_ROUNDING
        )


def test_unequal_shares_add_up_to_the_whole_batch() -> None:
    run_on_ranks(2, ragged_batches_equal_one_batch)


def replicas_are_compared() -> None:
    ctx = ParallelContext.build(Topology(dp=dist.get_world_size()))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(5, 2).to(dtype), ctx.replicas)
        ddp.check_replicas_agree()
        if ctx.dp.rank == 1:
            with torch.no_grad():
                ddp.module.bias[1] = torch.nextafter(
                    ddp.module.bias[1], torch.tensor(9.0).to(dtype)
                )
        with pytest.raises(
            NumericsError,
            match=r"different weights(.|\n)*1 of 2 parameters, bias, on ranks \[1\] against rank 0",
        ):
            ddp.check_replicas_agree()


def test_one_bit_of_difference_between_replicas_is_found() -> None:
    run_on_ranks(2, replicas_are_compared)
