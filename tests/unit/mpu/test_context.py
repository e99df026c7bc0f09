"""Tests of the context of a lone process, and of what `build` refuses."""

import pytest
import torch.distributed as dist

from megatron.errors import NotInitialisedError
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import Partition
from megatron.mpu.topology import Coord, Topology
from tests.support.models import second_of_two


def test_a_lone_process_is_first_and_last_of_every_group() -> None:
    ctx = ParallelContext.single()
    for group in (ctx.world, ctx.tp, ctx.pp, ctx.dp, ctx.cp, ctx.dp_cp, ctx.tp_cp, ctx.model):
        assert group.size == 1
        assert group.is_first
        assert group.is_last
    assert ctx.is_first_stage
    assert ctx.is_last_stage
    assert ctx.rank == 0
    assert ctx.coord == Coord(0, 0, 0, 0)
    assert [ctx.axis(name) for name in Coord._fields] == [ctx.pp, ctx.dp, ctx.cp, ctx.tp]


def test_first_and_last_are_by_index_in_the_group() -> None:
    group = Group(ranks=(3, 7), rank=1)
    assert group.size == 2
    assert not group.is_first
    assert group.is_last


def test_building_without_processes_is_refused() -> None:
    assert not dist.is_initialized()
    with pytest.raises(NotInitialisedError, match="before the processes found each other"):
        ParallelContext.build(Topology())


def test_shares_and_counts_follow_the_axis_of_a_partition() -> None:
    second = second_of_two()
    assert second.share(Partition("tp", dim=1)) == (1, 2)
    assert second.share(Partition("etp_ep")) == (0, 1)
    assert second.share(None) == (0, 1)
    assert second.counts(Partition("tp"))
    assert not second.counts(None), "the first tensor-parallel rank counts what both hold"
    assert second.counts(Partition("etp_ep")), "experts that are shared out are other ones"
