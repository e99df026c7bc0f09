"""Tests that collectives over one rank do nothing, and need no process group."""

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.mpu import collectives
from megatron.mpu.context import ParallelContext
from tests.support.examples import examples

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


@given(st.integers(1, 12), st.data())
@examples(60)
def test_parts_on_a_ring_come_from_the_rank_before_and_to_all(
    size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    order = collectives.ring_order(rank, size)
    assert sorted(order) == list(range(size))
    assert order[0] == rank
    # What it has after a shift, the rank before had until then.
    assert order[1:] == collectives.ring_order((rank - 1) % size, size)[:-1]


@given(st.integers(1, 8))
@examples(30)
def test_a_sum_on_a_ring_ends_at_its_own_rank_with_a_summand_of_each(size: int) -> None:
    orders = [collectives.ring_order((rank - 1) % size, size) for rank in range(size)]
    for part in range(size):
        path = [(part + 1 + step) % size for step in range(size)]
        assert [orders[rank][step] for step, rank in enumerate(path)] == [part] * size
        assert path[-1] == part


def test_a_ring_of_one_has_its_own_part() -> None:
    tensor = torch.arange(4.0)
    assert [part is tensor for part in collectives.ring(tensor, ALONE)] == [True]
    assert collectives.sum_on_ring(lambda part: tensor + part, ALONE).equal(tensor)


def test_a_group_of_one_gets_its_own_object_back() -> None:
    obj = {"key": 1}
    assert collectives.all_gather_object(obj, ALONE) == [obj]
    assert collectives.broadcast_object(obj, ALONE) is obj
    collectives.barrier(ALONE)
