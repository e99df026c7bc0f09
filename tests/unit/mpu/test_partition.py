"""Tests of how parameters are cut: pieces tile, slices join, refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.mpu.partition import (
    Init,
    Partition,
    Within,
    global_shape,
    init_of,
    is_sequence_parallel,
    join_slices,
    local_shape,
    local_slice,
    partition_of,
    pieces,
    set_parameter_metadata,
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Partition | None, int]:
    """A whole shape, a partition that divides it (or None), and the number of parts."""
    size, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= size * blocks
    if len(shape) > 1 and draw(st.booleans()):
        outer, parts = (dim + 1) % len(shape), draw(st.integers(1, 3))
        shape[outer] *= parts
        within = Within(dim, size, blocks)
        return tuple(shape), Partition("etp_ep", dim=outer, within=within), size * parts
    partition = draw(st.sampled_from([None, Partition("tp", dim=dim, blocks=blocks)]))
    return tuple(shape), partition, size


@given(cuts())
def test_pieces_over_all_indexes_hold_each_element_once(
    cut: tuple[tuple[int, ...], Partition | None, int],
) -> None:
    shape, partition, size = cut
    seen = torch.zeros(shape, dtype=torch.int64)
    for index in range(1 if partition is None else size):
        local_seen = torch.zeros(local_shape(shape, partition, size), dtype=torch.int64)
        for piece in pieces(shape, partition, index, size):
            seen[piece.global_] += 1
            local_seen[piece.local] += 1
            assert seen[piece.global_].shape == local_seen[piece.local].shape
        assert bool((local_seen == 1).all())
    assert bool((seen == 1).all())


@given(cuts())
def test_joining_the_slices_gives_the_whole(
    cut: tuple[tuple[int, ...], Partition | None, int],
) -> None:
    shape, partition, size = cut
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [local_slice(whole, partition, index, size) for index in range(size)]
    assert all(part.shape == local_shape(shape, partition, size) for part in parts)
    assert global_shape(parts[0].shape, partition, size) == shape
    assert torch.equal(join_slices(parts, partition), whole)


def test_a_rank_holds_its_part_of_every_block() -> None:
    gate_up = torch.arange(8)  # gate 0..3, up 4..7
    split = Partition("tp", dim=0, blocks=2)
    assert local_slice(gate_up, split, 0, 2).tolist() == [0, 1, 4, 5]
    assert local_slice(gate_up, split, 1, 2).tolist() == [2, 3, 6, 7]


def test_parts_that_are_cut_again_are_held_by_neighbours() -> None:
    experts = torch.arange(16).view(2, 8)  # of each gate 0..3, up 4..7
    split = Partition("etp_ep", dim=0, within=Within(1, 2, blocks=2))
    assert [local_slice(experts, split, rank, 4).tolist() for rank in range(4)] == [
        [[0, 1, 4, 5]],
        [[2, 3, 6, 7]],
        [[8, 9, 12, 13]],
        [[10, 11, 14, 15]],
    ]
    with pytest.raises(ConfigError, match="dimension 1 in 2 block"):
        local_shape((2, 6), split, 4)
    with pytest.raises(ConfigError, match="dimension 0 in 1 block"):
        pieces((3, 8), split, 0, 4)


def test_uneven_dimensions_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide evenly over the ranks") as caught:
        pieces((6, 4), Partition("tp", dim=0, blocks=2), 0, 2)
    assert "multiple of 4" in caught.value.fix


def test_a_parameter_says_how_it_is_split_and_initialised() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert partition_of(parameter) is None
    assert init_of(parameter) is None
    set_parameter_metadata(parameter, init=Init("normal", std=0.02), partition=Partition(dim=1))
    assert partition_of(parameter) == Partition("tp", 1, 1)
    assert init_of(parameter) == Init("normal", 0.02)
    assert parameter.split_by == Partition(dim=1)
    assert parameter.init == Init("normal", 0.02)


def test_a_parameter_says_when_its_gradients_are_to_be_summed_over_tp_first() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not is_sequence_parallel(parameter)
    set_parameter_metadata(parameter, init=Init("zeros"))
    assert not is_sequence_parallel(parameter)
    assert not hasattr(parameter, "reduce_first")
    set_parameter_metadata(parameter, init=Init("zeros"), sequence_parallel=True)
    assert is_sequence_parallel(parameter)
    assert parameter.reduce_first
