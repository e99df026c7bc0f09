"""Who holds whose state, and which save a run goes on from."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.local.recovery import (
    CopyKey,
    Transfer,
    holders,
    newest_everywhere,
    replication,
)
from megatron.errors import ConfigError

ALONE = [(rank,) for rank in range(8)]  # each rank holds its own state
BLOCKS = [(2, 1, 2), (4, 2, 2), (8, 2, 2), (8, 4, 2), (8, 2, 4), (6, 2, 3), (4, 1, 4), (3, 1, 1)]


def saved(iteration: int, *owners: int, save: str = "a") -> set[CopyKey]:
    return {CopyKey(iteration, save, owner) for owner in owners}


def test_the_holders_of_megatron_s_documentation() -> None:
    assert holders(8, 2, 2) == [(0, 2), (1, 3), (2, 0), (3, 1), (4, 6), (5, 7), (6, 4), (7, 5)]


@pytest.mark.parametrize(("world", "jump", "factor"), BLOCKS)
def test_every_state_has_as_many_holders_on_as_many_nodes(
    world: int, jump: int, factor: int
) -> None:
    found = holders(world, jump, factor)
    for rank, each in enumerate(found):
        assert each[0] == rank
        assert len({holder // jump for holder in each}) == factor, "a node holds it twice"
    for holder in range(world):
        assert sum(holder in each for each in found) == factor, "one rank holds more than others"


@pytest.mark.parametrize(("world", "jump", "factor"), BLOCKS)
def test_copies_are_sent_by_all_at_once(world: int, jump: int, factor: int) -> None:
    found = holders(world, jump, factor)
    steps = replication(found)
    assert len(steps) == factor - 1
    for step in steps:
        assert sorted(one.source for one in step) == list(range(world))
        assert sorted(one.target for one in step) == list(range(world))
    sent = {(one.owner, one.target) for step in steps for one in step}
    assert sent == {(rank, holder) for rank in range(world) for holder in found[rank][1:]}


def test_a_world_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 ranks; --replication-jump 2 times .* is 4"):
        holders(6, 2, 2)


def test_states_on_their_own_nodes_need_no_message() -> None:
    looked = [saved(7, 0), saved(7, 1), saved(7, 2), saved(7, 3)]
    found = newest_everywhere(looked, [0, 0, 2, 2], ALONE)
    assert found is not None
    assert (found.iteration, found.steps) == (7, ())


def test_a_lost_node_fetches_its_states_from_those_that_hold_them() -> None:
    # Node 0 is new; node 1 (ranks 2 and 3) holds all, as rank 2 and rank 3 have found out.
    looked = [set(), set(), saved(7, 0, 2), saved(7, 1, 3)]
    found = newest_everywhere(looked, [0, 0, 2, 2], ALONE)
    assert found is not None
    assert found.steps == ((Transfer(0, 2, 0), Transfer(1, 3, 1)),)


def test_a_lost_node_fetches_the_copies_that_it_held_too() -> None:
    looked = [set(), set(), saved(7, 0, 2), saved(7, 1, 3)]
    found = newest_everywhere(looked, [0, 0, 2, 2], holders(4, 2, 2))
    assert found is not None
    sent = {one for step in found.steps for one in step}
    assert sent == {Transfer(0, 2, 0), Transfer(1, 3, 1), Transfer(2, 2, 0), Transfer(3, 3, 1)}


def test_one_rank_that_holds_two_lost_states_sends_one_after_the_other() -> None:
    looked = [set(), set(), saved(7, 0, 1, 2)]
    found = newest_everywhere(looked, [0, 1, 2], ALONE)
    assert found is not None
    assert found.steps == ((Transfer(0, 2, 0),), (Transfer(1, 2, 1),))


def test_an_older_save_serves_where_the_newest_is_not_there_of_all() -> None:
    looked = [saved(7, 0) | saved(8, 0), saved(7, 1)]
    found = newest_everywhere(looked, [0, 0], ALONE)
    assert found is not None
    assert found.iteration == 7
    assert newest_everywhere([saved(8, 0), set()], [0, 0], ALONE) is None


def test_states_of_two_saves_of_one_iteration_are_not_mixed() -> None:
    looked = [saved(7, 0, save="a"), saved(7, 1, save="b")]
    assert newest_everywhere(looked, [0, 0], ALONE) is None


@given(
    data=st.data(),
    world=st.integers(1, 6),
)
def test_whatever_was_lost_a_recovery_is_whole_and_the_newest(
    data: st.DataObject, world: int
) -> None:
    folders = data.draw(st.lists(st.integers(0, world - 1), min_size=world, max_size=world))
    every = list(product((1, 2), range(world)))
    looked = [
        {CopyKey(i, "a", owner) for i, owner in data.draw(st.sets(st.sampled_from(every)))}
        for _ in range(world)
    ]
    there = set().union(*looked)
    whole = [i for i in (1, 2) if all(CopyKey(i, "a", owner) in there for owner in range(world))]
    factor = data.draw(st.sampled_from([f for f in range(1, world + 1) if world % f == 0]))
    holders_of = holders(world, 1, factor)
    found = newest_everywhere(looked, folders, holders_of)
    if found is None:
        assert not whole
        return
    assert found.iteration == max(whole)
    has = {folder: set() for folder in folders}  # type: dict[int, set[int]]
    for rank, keys in enumerate(looked):
        has[folders[rank]] |= {key.owner for key in keys if key.iteration == found.iteration}
    for step in found.steps:
        assert len({one.source for one in step}) == len(step), "a rank sends two at once"
        assert len({one.target for one in step}) == len(step), "a rank receives two at once"
        for one in step:
            assert one.owner in has[folders[one.source]], "it sends what it has not"
    for one in (one for step in found.steps for one in step):
        has[folders[one.target]].add(one.owner)
    for owner in range(world):
        assert all(owner in has[folders[holder]] for holder in holders_of[owner])
