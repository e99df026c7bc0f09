"""What the distributed mpu tests share: fp64 sample weights, and grids for a number of ranks."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import global_shape, local_slice, partition_of
from megatron.mpu.topology import Topology

# fp64 sums in another order: a few roundings of numbers near one.
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def build(tp: int = 1, pp: int = 1, cp: int = 1) -> ParallelContext:
    """The context of this rank in a grid that fills the test's world."""
    topology = Topology.fill(dist.get_world_size(), tp=tp, pp=pp, cp=cp)
    return ParallelContext.build(topology, timedelta(seconds=30))


def sample(*shape: int, seed: int) -> Tensor:
    """The same fp64 normal numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def fill(parameter: nn.Parameter, ctx: ParallelContext, *, seed: int) -> Tensor:
    """Give `parameter` this rank's part of a sample, and return the whole sample."""
    split = partition_of(parameter)
    whole = sample(*global_shape(parameter.shape, split, ctx.tp.size), seed=seed)
    with torch.no_grad():
        parameter.copy_(local_slice(whole, split, ctx.tp.rank, ctx.tp.size))
    return whole.requires_grad_()


def own_part(whole: Tensor, parameter: nn.Parameter, ctx: ParallelContext) -> Tensor:
    """This rank's part of a tensor shaped like the whole of `parameter`."""
    return local_slice(whole, partition_of(parameter), ctx.tp.rank, ctx.tp.size)
