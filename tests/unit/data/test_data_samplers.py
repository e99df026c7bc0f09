"""Ranks share each step without overlap, and a resumed order is the tail of the whole one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.errors import ConfigError, DataError
from tests.support.examples import examples


def sequential(total, consumed=0, *, size=2, rank=0, ranks=1, **options):
    return MegatronPretrainingSampler(
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=size,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **options,
    )


def shuffled(total, consumed=0, *, size=2, rank=0, ranks=1, seed=1234):
    return MegatronPretrainingRandomSampler(
        total_samples=total,
        consumed_samples=consumed,
        micro_batch_size=size,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        seed=seed,
    )


def in_step_order(make, total, consumed, *, size, ranks, **options):
    """The samples of all ranks, micro-batch by micro-batch, rank by rank."""
    samplers = [
        make(total, consumed, size=size, rank=r, ranks=ranks, **options) for r in range(ranks)
    ]
    lengths = {len(sampler) for sampler in samplers}
    batches = [list(sampler) for sampler in samplers]
    assert lengths == {len(own) for own in batches}
    return [index for step in zip(*batches) for batch in step for index in batch]


grids = {
    "total": st.integers(1, 80),
    "size": st.integers(1, 5),
    "ranks": st.integers(1, 6),
    "consumed": st.integers(0, 200),
}


@examples(200)
@given(**grids)
def test_sequential_ranks_cover_the_rest_in_order_up_to_a_full_step(total, size, ranks, consumed):
    consumed = min(consumed, total)
    if total < size * ranks:
        with pytest.raises(DataError, match="smaller than one micro-batch on every"):
            sequential(total, consumed, size=size, ranks=ranks)
        return
    steps = (total - consumed) // (size * ranks)
    seen = in_step_order(sequential, total, consumed, size=size, ranks=ranks)
    assert seen == list(range(consumed, consumed + steps * size * ranks))


@examples(200)
@given(**grids)
def test_a_tail_that_is_kept_is_shared_evenly_or_refused(total, size, ranks, consumed):
    consumed = min(consumed, total)
    if (total - consumed) % (size * ranks) % ranks:
        with pytest.raises(DataError, match="cannot be shared evenly"):
            sequential(total, consumed, size=size, ranks=ranks, drop_last=False)
        return
    seen = in_step_order(sequential, total, consumed, size=size, ranks=ranks, drop_last=False)
    assert seen == list(range(consumed, total))


@examples(200)
@given(**grids, seed=st.integers(0, 2**32 - 1))
def test_shuffled_order_is_one_stream_whatever_the_grid(total, size, ranks, consumed, seed):
    if total < size * ranks:
        with pytest.raises(DataError, match="smaller than one micro-batch on every"):
            shuffled(total, consumed, size=size, ranks=ranks)
        return
    epochs = (consumed + total) // total + 2
    one = shuffled(total, size=1, seed=seed)
    stream = [index for _ in range(epochs) for batch in one for index in batch]
    for epoch in range(epochs):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))
    seen = in_step_order(shuffled, total, consumed, size=size, ranks=ranks, seed=seed)
    assert seen == stream[consumed : consumed + len(seen)]
    left = total - consumed % total
    assert left <= len(seen) < left + size * ranks


def test_iterating_again_goes_on_where_the_last_epoch_ended():
    sampler = shuffled(10, size=4)
    one = shuffled(10, size=1)
    stream = [index for _ in range(4) for batch in one for index in batch]
    seen = [index for _ in range(3) for batch in sampler for index in batch]
    assert seen == stream[: len(seen)]
    assert sampler.consumed_samples == len(seen)


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = shuffled(50, size=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert first != list(shuffled(50, size=1, seed=1))
    assert first == list(shuffled(50, size=1))


def test_the_shuffled_order_is_frozen():
    assert [batch[0] for batch in shuffled(8, size=1)] == [4, 5, 3, 1, 2, 0, 6, 7]


def test_a_resumed_order_is_the_tail_of_the_whole_one():
    for make in (sequential, shuffled):
        whole = [index for batch in make(40) for index in batch]
        for consumed in range(0, 40, 2):
            assert [i for batch in make(40, consumed) for i in batch] == whole[consumed:]


def test_a_finished_run_has_nothing_left():
    sampler = sequential(8, 8)
    assert len(sampler) == 0
    assert list(sampler) == []


def test_more_consumed_than_there_is_is_refused():
    with pytest.raises(DataError, match="more samples were consumed") as raised:
        sequential(8, 9)
    assert "9 consumed of 8" in str(raised.value)


@pytest.mark.parametrize("make", [sequential, shuffled])
def test_impossible_positions_are_refused(make):
    with pytest.raises(DataError, match="nothing to sample from"):
        make(0)
    with pytest.raises(DataError, match="consumed samples is negative"):
        make(8, -1)
    with pytest.raises(ConfigError, match="--micro-batch-size 0"):
        make(8, size=0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        make(8, rank=2, ranks=2)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ConfigError, match="seed of the sample order"):
        shuffled(8, seed=seed)
