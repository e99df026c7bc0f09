"""Tests of megatron.optimizer.buckets."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.optimizer.buckets import (
    ALIGN_ELEMENTS,
    ElementRange,
    ReductionTime,
    default_bucket_elements,
    owned_ranges,
    plan_flat,
)

PARAMETERS = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(list(ReductionTime))), min_size=1, max_size=12
)
SHARDS = st.integers(1, 5)
LIMITS = st.sampled_from([1, 64, 300, 10**9])


@given(PARAMETERS, SHARDS, LIMITS)
def test_buckets_tile_the_buffer_and_hold_every_parameter_once(
    parameters: list[tuple[int, ReductionTime]], shards: int, limit: int
) -> None:
    counts, turns = [count for count, _ in parameters], [turn for _, turn in parameters]
    plan = plan_flat(counts, turns, shards=shards, bucket_elements=limit)
    members = [member for bucket in plan.buckets for member in bucket.members]
    assert sorted(members) == list(range(len(counts)))
    ends = [bucket.range.stop for bucket in plan.buckets]
    assert [bucket.range.start for bucket in plan.buckets] == [0, *ends[:-1]]
    assert plan.elements == ends[-1]
    for bucket in plan.buckets:
        at = bucket.range.start
        for member in bucket.members:
            place = plan.places[member]
            assert (place.start, place.size) == (at, counts[member])
            at = -(-place.stop // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        assert at <= bucket.range.stop < at + shards * ALIGN_ELEMENTS
        kinds = {turns[member] for member in bucket.members}
        assert len(kinds) == 1
        assert bucket.held == (kinds != {ReductionTime.PROMPT})
        if kinds == {ReductionTime.ALONE}:
            assert len(bucket.members) == 1
    held = [bucket.held for bucket in plan.buckets]
    assert held == sorted(held)


@given(PARAMETERS, SHARDS, LIMITS)
def test_every_element_has_one_owner_and_shares_are_equal(
    parameters: list[tuple[int, ReductionTime]], shards: int, limit: int
) -> None:
    counts, turns = [count for count, _ in parameters], [turn for _, turn in parameters]
    plan = plan_flat(counts, turns, shards=shards, bucket_elements=limit)
    for bucket in plan.buckets:
        shares = [bucket.share(index, shards) for index in range(shards)]
        assert len({share.size for share in shares}) == 1
        assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]
        assert (shares[0].start, shares[-1].stop) == bucket.range
        assert all(share.start % ALIGN_ELEMENTS == 0 for share in shares)
    by_shard = [owned_ranges(plan, index, shards) for index in range(shards)]
    for index, count in enumerate(counts):
        pieces = [owned[index] for owned in by_shard if owned[index].size]
        assert [piece.start for piece in pieces] == [0, *(p.stop for p in pieces[:-1])][
            : len(pieces)
        ]
        assert sum(piece.size for piece in pieces) == count


def test_the_last_parameters_come_first_and_the_held_ones_last() -> None:
    turns = [ReductionTime.PROMPT, ReductionTime.ALONE, ReductionTime.PROMPT, ReductionTime.HELD]
    plan = plan_flat([100, 10, 64, 1], turns, shards=2, bucket_elements=65)
    assert plan.places == (
        ElementRange(64, 164),
        ElementRange(384, 394),
        ElementRange(0, 64),
        ElementRange(256, 257),
    )
    assert [bucket.range for bucket in plan.buckets] == [(0, 256), (256, 384), (384, 512)]
    assert owned_ranges(plan, 0, 2) == ((0, 64), (0, 10), (0, 64), (0, 1))
    assert owned_ranges(plan, 1, 2) == ((64, 100), (0, 0), (0, 0), (0, 0))


def test_buckets_grow_with_many_shards() -> None:
    assert [default_bucket_elements(shards) for shards in (1, 100)] == [40_000_000, 100_000_000]
