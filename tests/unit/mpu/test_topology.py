"""Tests of the rank grid: bijection, Megatron's order, refusals."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError
from megatron.mpu.topology import Coord, Topology

sizes = st.integers(1, 4)
grids = st.builds(Topology, tp=sizes, pp=sizes, dp=sizes, cp=sizes, pp_before_dp=st.booleans())
axes = st.lists(st.sampled_from(Coord._fields), unique=True)


@given(grids)
def test_coord_inverts_rank(grid: Topology) -> None:
    assert [grid.rank(grid.coord(r)) for r in range(grid.world_size)] == list(
        range(grid.world_size)
    )


@given(grids, axes)
def test_groups_hold_each_rank_once_and_agree_with_peers(grid: Topology, axes: list[str]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        assert all(grid.peers(rank, *axes) == group for rank in group)


@given(grids, axes)
def test_peers_are_the_ranks_with_equal_other_coordinates(grid: Topology, axes: list[str]) -> None:
    fixed = [axis for axis in Coord._fields if axis not in axes]
    for rank in range(grid.world_size):
        here = grid.coord(rank)
        expected = tuple(
            other
            for other in range(grid.world_size)
            if all(getattr(grid.coord(other), axis) == getattr(here, axis) for axis in fixed)
        )
        assert grid.peers(rank, *axes) == expected


@given(grids, st.integers(1, 4), st.integers(1, 4))
def test_parts_of_replicas_cross_the_sets_with_equal_shares(
    grid: Topology, ep: int, instances: int
) -> None:
    ep = math.gcd(ep, grid.stage_size)
    dense, etp = grid.dp * grid.cp, None if ep == 1 else 1
    of_experts = dense if ep == 1 else grid.stage_size // ep
    if dense % instances or of_experts % instances:
        with pytest.raises(ConfigError, match="equal parts that share optimizer state") as caught:
            replace(grid, ep=ep, etp=etp, instances=instances)
        assert f"divides {math.gcd(dense, of_experts)}" in caught.value.fix
        return
    grid = replace(grid, ep=ep, etp=etp, instances=instances)
    for replicas in (grid.groups("dp", "cp"), grid.expert_replica_groups()):
        sharing, across = grid.sharing_groups(replicas)
        for groups in (sharing, across):
            assert sorted(rank for group in groups for rank in group) == [*range(grid.world_size)]
        assert {len(group) for group in across} == {instances}
        for whole in replicas:
            parts = [group for group in sharing if set(group) <= set(whole)]
            assert len(parts) == instances
            # Part i of each is held by ranks that are one set across.
            assert set(zip(*parts)) <= set(across)


def test_tp_varies_fastest_then_cp_then_dp_then_pp() -> None:
    grid = Topology.fill(16, tp=2, pp=4)
    assert grid == Topology(tp=2, pp=4, dp=2)
    assert grid.peers(4, "tp") == (4, 5)
    assert grid.peers(0, "dp") == (0, 2)
    assert grid.peers(1, "pp") == (1, 5, 9, 13)
    assert grid.coord(7) == Coord(pp=1, dp=1, cp=0, tp=1)
    grid = Topology.fill(16, tp=2, pp=2, cp=2)
    assert grid == Topology(tp=2, pp=2, dp=2, cp=2)
    assert grid.peers(0, "cp") == (0, 2)
    assert grid.peers(0, "cp", "tp") == (0, 1, 2, 3)
    assert grid.peers(0, "dp", "cp") == (0, 2, 4, 6)
    assert grid.coord(7) == Coord(pp=0, dp=1, cp=1, tp=1)


def test_stages_can_be_nearer_than_replicas() -> None:
    grid = replace(Topology.fill(16, tp=2, pp=2, cp=2), pp_before_dp=True)
    assert grid.peers(0, "tp") == (0, 1)
    assert grid.peers(0, "cp") == (0, 2)
    assert grid.peers(0, "pp") == (0, 4)
    assert grid.peers(0, "dp") == (0, 8)
    assert grid.coord(12) == Coord(pp=1, dp=1, cp=0, tp=0)
    assert grid.groups("dp", "cp", "tp")[0] == (0, 1, 2, 3, 8, 9, 10, 11)


@given(grids, st.data())
def test_experts_have_a_grid_of_their_own_within_every_stage(
    grid: Topology, data: st.DataObject
) -> None:
    divisors = [n for n in range(1, grid.stage_size + 1) if grid.stage_size % n == 0]
    ep, etp = (data.draw(st.sampled_from(divisors)) for _ in range(2))
    if grid.stage_size % (ep * etp):
        with pytest.raises(ConfigError, match="do not divide into groups that share experts"):
            replace(grid, ep=ep, etp=etp)
        return
    grid = replace(grid, ep=ep, etp=etp)
    assert grid.shares_experts_out is ((ep, etp) != (1, grid.tp))
    sharing, replicas = grid.expert_groups(), grid.expert_replica_groups()
    for groups in (sharing, replicas):
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        for group in groups:
            assert len({grid.coord(rank).pp for rank in group}) == 1, "of one stage"
    assert {len(group) for group in sharing} == {ep * etp}
    if not grid.shares_experts_out:
        assert {*replicas} == {*grid.groups("dp", "cp")}, "experts are split over tp"
        assert {*sharing} == {*grid.groups("tp")}
    # One rank of each group that shares, always at the same place in it.
    place = {rank: group.index(rank) for group in sharing for rank in group}
    for group in replicas:
        assert len({place[rank] for rank in group}) == 1
        assert len(group) * ep * etp == grid.stage_size


@given(grids, st.data())
def test_the_ranks_of_a_whole_model_hold_each_of_its_weights(
    grid: Topology, data: st.DataObject
) -> None:
    divisors = [n for n in range(1, grid.stage_size + 1) if grid.stage_size % n == 0]
    ep, etp = (data.draw(st.sampled_from(divisors)) for _ in range(2))
    assume(grid.stage_size % (ep * etp) == 0)
    grid = replace(grid, ep=ep, etp=etp)
    groups = grid.whole_model_groups()
    if groups is None:
        assert (ep * etp) % grid.tp, "experts are over other ranks than matrices"
        assert grid.tp % (ep * etp)
        return
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    larger = max(grid.tp, ep * etp) if grid.shares_experts_out else grid.tp
    for group in groups:
        assert len(group) == larger * grid.pp
        # Whoever computes with a rank of the group is in it.
        for of_axis in (grid.groups("tp"), grid.groups("pp"), grid.expert_groups()):
            for ranks in of_axis:
                assert {*ranks} <= {*group} or not {*ranks} & {*group}


def test_the_ranks_of_a_whole_model_are_of_all_stages() -> None:
    assert Topology(pp=2, dp=4, ep=2).whole_model_groups() == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Topology(tp=2, pp=2, ep=2, etp=1).whole_model_groups() == ((0, 1, 2, 3),)
    near = Topology(pp=2, dp=4, ep=2, pp_before_dp=True)
    assert near.whole_model_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Topology(tp=2, dp=3, ep=3, etp=1).whole_model_groups() is None


def test_expert_groups_are_neighbours() -> None:
    grid = Topology(tp=2, dp=2, pp=2, ep=2, etp=1)
    assert grid.expert_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.expert_replica_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    with pytest.raises(ConfigError, match="do not divide into groups that share experts") as caught:
        Topology(tp=2, dp=2, ep=3, etp=1)
    assert caught.value.fix == "use sizes whose product divides 4"
    with pytest.raises(ConfigError, match="not set: that of tp") as caught:
        Topology(tp=2, dp=2, ep=4)
    assert "such as --expert-tensor-parallel-size 1" in caught.value.fix


def test_parts_of_experts_are_nearer_than_experts() -> None:
    grid = Topology(tp=2, dp=4, ep=2)
    assert grid.expert_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.expert_replica_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_flags_give_the_grid() -> None:
    flags = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=4,
        use_tp_pp_dp_mapping=True,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
    )
    sizes = {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 4}
    assert Topology.of(flags, 32) == Topology(**sizes, dp=4, pp_before_dp=True, instances=2)


def test_fill_refuses_ranks_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="do not divide into whole model replicas") as caught:
        Topology.fill(6, tp=2, pp=2)
    assert "multiple of 4" in caught.value.fix
    assert "--tensor-model-parallel-size 2" in str(caught.value.found)


@pytest.mark.parametrize(("world_size", "tp", "pp"), [(2, 4, 1), (1, 1, 2), (0, 1, 1)])
def test_fill_never_shrinks_a_size_to_fit(world_size: int, tp: int, pp: int) -> None:
    with pytest.raises(ConfigError, match="do not divide"):
        Topology.fill(world_size, tp=tp, pp=pp)


@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp", "ep", "etp"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_must_be_positive(axis: str, size: int) -> None:
    with pytest.raises(ConfigError, match="a parallel size is not positive"):
        Topology(**{axis: size})
