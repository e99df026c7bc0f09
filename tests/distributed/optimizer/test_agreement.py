"""A difference between ranks is found on all of them, and named."""

import pytest
import torch
import torch.distributed as dist

from megatron.errors import NumericsError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.optimizer.agreement import check_bitwise_equal
from tests.support.ranks import run_on_ranks


def one_rank_of_three_differs() -> None:
    group = ParallelContext.build(Topology(tp=dist.get_world_size())).tp
    named = [(f"weight {index}", torch.full((3,), float(index))) for index in range(7)]
    check_bitwise_equal(named, group, problem="ranks part")
    if group.rank == 1:
        for _, tensor in named[1:]:
            tensor[2] = torch.nextafter(tensor[2], torch.tensor(9.0))
    with pytest.raises(NumericsError, match="ranks part") as caught:
        check_bitwise_equal(named, group, problem="ranks part")
    assert caught.value.found == (
        "6 of 7 parameters, weight 1, weight 2, weight 3, weight 4, weight 5, "
        "on ranks [1] against rank 0"
    )
    more = named if group.rank else named[:1]
    with pytest.raises(NumericsError, match=r"on ranks \[1, 2\] against rank 0"):
        check_bitwise_equal(more, group, problem="ranks part")


def test_one_bit_is_found_on_every_rank_and_at_most_five_names_are_given() -> None:
    run_on_ranks(3, one_rank_of_three_differs)
