"""Tests of process groups: the ranks in each, real handles, shared communicators."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext
from megatron.mpu.data import broadcast_batch
from megatron.mpu.topology import Topology
from tests.distributed.mpu.reference import build
from tests.support.ranks import run_on_ranks

NAMES = ("world", "tp", "pp", "dp", "cp", "dp_cp", "tp_cp", "model")
EXPERTS = ("etp_ep", "ep", "etp", "edp")


def every_group_sums_over_its_own_ranks(tp: int, pp: int) -> dict[str, tuple[int, ...]]:
    ctx = build(tp, pp)
    me = dist.get_rank()
    groups = {name: getattr(ctx, name) for name in (*NAMES, *EXPERTS)}
    for group in groups.values():
        # A group of None would sum over the world.
        assert group.handle is not None
        bits = torch.tensor([2**me])
        dist.all_reduce(bits, group=group.handle)
        assert bits.item() == sum(2**rank for rank in group.ranks)
        assert group.ranks[group.rank] == me
        assert dist.get_process_group_ranks(group.handle) == list(group.ranks)
    assert ctx.rank == me
    assert ctx.coord == ctx.topology.coord(me)
    for axis in ("tp", "pp", "dp"):
        assert groups[axis].ranks == ctx.topology.peers(me, axis)
    assert ctx.model.ranks == ctx.topology.peers(me, "tp", "pp")
    return {name: group.ranks for name, group in groups.items()}


@pytest.mark.parametrize(
    ("world_size", "tp", "pp"), [(2, 1, 1), (2, 2, 1), (4, 2, 2), (4, 2, 1), (8, 2, 2)]
)
def test_every_group_sums_over_its_own_ranks(world_size: int, tp: int, pp: int) -> None:
    run_on_ranks(world_size, every_group_sums_over_its_own_ranks, tp, pp)


def equal_groups_share_one_communicator() -> tuple[int, bool]:
    ctx = build(tp=2)
    handles = {id(getattr(ctx, name).handle) for name in NAMES}
    return len(handles), ctx.tp.handle is ctx.model.handle


def test_equal_groups_share_one_communicator_but_not_the_worlds() -> None:
    assert run_on_ranks(2, equal_groups_share_one_communicator) == [(3, True)] * 2


def a_batch_where_nccl_sends_tensors_of_gpus() -> tuple[bool, list[int]]:
    """Build groups as if the world were one of NCCL, whose barriers and sums are not called."""
    gloo = build(tp=2)
    assert gloo.host_tp_cp is gloo.tp_cp, "gloo sends tensors of the host"
    with patch.object(dist, "get_backend", lambda group=None: dist.Backend.NCCL):
        ctx = build(tp=2)
    batch = {"text": torch.arange(3)} if ctx.tp.is_first else None
    received = broadcast_batch(batch, ctx.host_tp_cp)
    assert ctx.host_tp_cp.ranks == ctx.tp.ranks
    return ctx.host_tp_cp.handle is ctx.tp.handle, received["text"].tolist()


def test_batches_have_a_group_of_their_own_beside_nccl() -> None:
    assert run_on_ranks(2, a_batch_where_nccl_sends_tensors_of_gpus) == [(False, [0, 1, 2])] * 2


def a_grid_for_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="the parallel grid is for another number of ranks"):
        ParallelContext.build(Topology(tp=4))


def test_a_grid_for_other_ranks_is_refused() -> None:
    run_on_ranks(2, a_grid_for_other_ranks_is_refused)
