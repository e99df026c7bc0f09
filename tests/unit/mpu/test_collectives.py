"""Tests that collectives over one rank do nothing, and need no process group."""

import torch
import torch.distributed as dist

from megatron.mpu import collectives
from megatron.mpu.context import ParallelContext

ALONE = ParallelContext.single().tp


def test_a_group_of_one_gets_its_own_tensor_back() -> None:
    assert not dist.is_initialized()
    tensor = torch.arange(4.0)
    for op in ("sum", "mean", "max", "min"):
        assert collectives.all_reduce(tensor, ALONE, op=op) is tensor
    assert collectives.start_all_reduce(tensor, ALONE).wait() is tensor
    assert collectives.start_all_gather(tensor, ALONE).wait() is tensor
    assert collectives.start_reduce_scatter(tensor, ALONE).wait() is tensor
    for start in (collectives.start_all_gather, collectives.start_reduce_scatter):
        out = torch.full_like(tensor, -1)
        assert start(tensor, ALONE, out=out).wait() is out
        assert torch.equal(out, tensor)
    assert collectives.all_gather(tensor, ALONE) is tensor
    assert collectives.reduce_scatter(tensor, ALONE) is tensor
    assert collectives.broadcast(tensor, ALONE) is tensor
    assert collectives.start_shift(tensor, ALONE).wait() is tensor
    assert collectives.all_to_all(tensor, ALONE) is tensor
    assert collectives.start_all_to_all_rows(tensor, [4], [4], ALONE).wait() is tensor
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_group_of_one_gets_its_own_object_back() -> None:
    obj = {"key": 1}
    assert collectives.all_gather_object(obj, ALONE) == [obj]
    assert collectives.broadcast_object(obj, ALONE) is obj
    collectives.barrier(ALONE)
