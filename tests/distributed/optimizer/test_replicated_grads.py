"""Gradients of what tensor-parallel ranks hold whole: summands are summed, once, to equal bits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Init, Partition, set_parameter_metadata
from megatron.mpu.topology import Topology
from megatron.optimizer.replicated_grads import reduce_replicated
from tests.support.ranks import run_on_ranks

# float32: the sum of three numbers near one in another order.
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def gradients_after() -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of this rank before and after; tp = 3 is one of the numbers with rounding."""
    tp = ParallelContext.build(Topology(tp=dist.get_world_size())).tp
    generator = torch.Generator().manual_seed(tp.rank)
    kinds = [(True, None), (False, None), (False, Partition("tp", dim=0)), (True, None)]
    parameters = []
    for length, (sequence_parallel, partition) in enumerate(kinds, start=3):
        parameter = Parameter(torch.zeros(length, 2))
        set_parameter_metadata(
            parameter,
            init=Init("zeros"),
            partition=partition,
            sequence_parallel=sequence_parallel,
        )
        parameter.main_grad = torch.randn(length, 2, generator=generator)  # type: ignore[attr-defined]
        parameters.append(parameter)
    before = [parameter.main_grad.clone() for parameter in parameters]
    views = [parameter.main_grad for parameter in parameters]
    reduce_replicated(parameters, tp)
    assert all(now.main_grad is view for now, view in zip(parameters, views)), "in place"
    return before, views


def test_summands_are_summed_and_equal_gradients_are_left_alone() -> None:
    ranks = run_on_ranks(3, gradients_after)
    for at, summed in enumerate([True, False, False, True]):
        total = torch.stack([before[at] for before, _ in ranks]).sum(0)
        for before, after in ranks:
            if summed:
                torch.testing.assert_close(after[at], total, **ROUNDING)
                assert torch.equal(after[at], ranks[0][1][at])
            else:
                assert torch.equal(after[at], before[at])
