"""Tests of the context of a lone process, and of what `build` refuses."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron.errors import ConfigError, NotInitialisedError
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


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (Topology(tp=2), "model"),
        (Topology(dp=2, ep=2), "etp_ep"),
        (Topology(tp=2, dp=2, ep=2), "etp_ep"),
        (Topology(tp=4, ep=2, etp=1), "tp"),
    ],
)
def test_the_ranks_of_a_whole_model_hold_dense_weights_and_experts(
    grid: Topology, expected: str
) -> None:
    assert grid_context(grid).whole_model.ranks == getattr(grid_context(grid), expected).ranks


def test_ranks_that_hold_no_whole_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not hold one whole model"):
        _ = grid_context(Topology(tp=2, dp=3, ep=3, etp=1)).whole_model


def grid_context(grid: Topology) -> ParallelContext:
    """Return the context of rank 0 of a grid, for tests that do not communicate."""
    alone = ParallelContext.single()
    ranks = {name: Group(grid.peers(0, *axes), 0) for name, axes in AXES.items()}
    ranks["etp_ep"] = Group(grid.expert_groups()[0], 0)
    whole = grid.whole_model_groups()
    all_weights = None if whole is None else Group(whole[0], 0)
    return replace(alone, topology=grid, all_weights=all_weights, **ranks)


AXES = {"tp": ("tp",), "pp": ("pp",), "model": ("pp", "tp")}
