"""Tests of megatron.optimizer.sharded_flats: each element has one owner, and lies in its share."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from megatron.mpu.context import Group, ReplicaGroups, Replicas
from megatron.mpu.partition import (
    Init,
    InitKind,
    Partition,
    set_parameter_metadata,
    set_sharding_unit,
)
from megatron.optimizer.sharded_flats import own_elements, own_ranges, sharded_flats
from tests.support.examples import examples


def parameters_of(sizes: list[int], units: list[str]) -> list[Parameter]:
    made = []
    for at, (size, unit) in enumerate(zip(sizes, units)):
        parameter = Parameter(torch.full((size,), float(at)))
        set_sharding_unit(parameter, unit)
        made.append(parameter)
    return made


def replicas_of(rank: int, size: int) -> ReplicaGroups:
    return ReplicaGroups.one(Group(tuple(range(size)), rank))


@examples(100)
@given(
    members=st.lists(st.tuples(st.integers(1, 400), st.sampled_from("ab")), min_size=1, max_size=6),
    size=st.integers(1, 5),
)
def test_over_all_ranks_every_element_is_owned_once(
    members: list[tuple[int, str]], size: int
) -> None:
    sizes, units = map(list, zip(*members))
    owners: dict[int, list[int]] = {at: [0] * number for at, number in enumerate(sizes)}
    for rank in range(size):
        parameters = parameters_of(sizes, units)
        flats = sharded_flats(parameters, replicas_of(rank, size), lambda p: p.dtype)
        assert len(flats) == len(set(units))
        for flat in flats:
            (bucket,) = flat.plan.buckets
            share = bucket.share(rank, size)
            whole = torch.full((flat.plan.elements,), -1.0)
            for parameter, place in zip(flat.parameters, flat.plan.places):
                whole[place.start : place.stop] = parameter.detach()
            flat.data.copy_(whole[share.start : share.stop])
            owned = zip(flat.parameters, own_ranges(flat), own_elements(flat), strict=True)
            for parameter, range_, elements in owned:
                at = int(parameter[0])
                assert elements.tolist() == [float(at)] * range_.size
                for element in range(range_.start, range_.stop):
                    owners[at][element] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


def test_experts_that_are_shared_out_lie_apart_over_their_own_replicas() -> None:
    dense, expert = parameters_of([3, 4], ["layers.0", "layers.0"])
    set_parameter_metadata(expert, init=Init(InitKind.ZEROS), partition=Partition("etp_ep"))
    whole, parts, across = Group((0, 1, 2, 3), 0), Group((0, 1), 0), Group((0, 2), 0)
    groups = ReplicaGroups(Replicas(whole, parts, across), Replicas(across, across))
    flats = sharded_flats([dense, expert], groups, lambda parameter: parameter.dtype)
    assert [(flat.group, flat.across) for flat in flats] == [(parts, across), (across, None)]


def test_tied_weights_are_held_back_where_gathers_overlap() -> None:
    (tied,) = parameters_of([3], ["embedding.word"])
    vars(tied)["reduce_first"] = True
    (flat,) = sharded_flats([tied], replicas_of(0, 2), lambda parameter: parameter.dtype)
    assert flat.plan.buckets[0].held
