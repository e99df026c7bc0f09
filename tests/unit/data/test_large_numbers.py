"""Orders of more tokens and samples than 32 bits can count, without arrays of that length."""

import numpy as np
import pytest

from megatron.data import data_samplers, gpt_dataset
from megatron.data.blendable_dataset import draw_problems, samples_of_component
from megatron.data.corpus.index_file import item_starts
from megatron.data.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from megatron.data.data_utils import split_ranges
from megatron.data.gpt_dataset import EpochPlan, plan_epochs
from megatron.data.orders.sample_maps import (
    build_blending_indices,
    build_blending_indices_with_python,
    build_sample_idx,
    build_sample_idx_with_numpy,
    compiled_is_used,
)

MOST = 2**31 - 1  # tokens of one item, at most


@pytest.mark.parametrize("seq_length", [12_345_677, 2**27, MOST, 2**31 + 11, 2**32 + 3])
def test_samples_begin_where_whole_numbers_say_beyond_four_gibitokens(seq_length):
    """Compiled, twin, and Python's own integers: ten thousand million tokens, five documents."""
    sizes = np.array([MOST, 0, MOST, MOST - 1, 5, MOST], np.int32)
    order = np.array([3, 5, 0, 1, 4, 2, 5, 3], np.int32)
    ends = np.cumsum([int(sizes[document]) for document in order]).tolist()
    assert ends[-1] > 2**33
    numbers = {"seq_length": seq_length, "num_epochs": 1, "tokens_per_epoch": ends[-1]}
    rows = build_sample_idx(sizes, order, **numbers)
    twin = build_sample_idx_with_numpy(sizes, order, **numbers)
    assert compiled_is_used(), "or there is nothing to compare"
    assert rows.dtype == twin.dtype
    assert rows.tobytes() == twin.tobytes()
    expected = []
    for token in range(0, ends[-1], seq_length):
        position = next(p for p, end in enumerate(ends) if token < end)
        expected.append([position, token - (ends[position] - int(sizes[order[position]]))])
    assert rows.tolist() == [[0, 0], *expected[1 : (ends[-1] - 1) // seq_length + 1]]


def test_bytes_of_items_are_counted_in_64_bits():
    sizes = np.broadcast_to(np.int32(MOST), (4,))
    assert item_starts(sizes, np.dtype("<i8")).tolist() == [i * 8 * MOST for i in range(4)]
    assert item_starts(sizes, np.dtype("<u2"))[-1] > 2**33


def test_many_items_add_up_without_a_copy_of_their_sizes():
    """2^30 sizes, which are one number in memory: their sum is the corpus's number of tokens."""
    sizes = np.broadcast_to(np.int32(MOST), (2**30,))
    assert int(sizes[: 2**20].sum(dtype=np.int64)) == 2**20 * MOST
    first, train, valid, stop = split_ranges("3,1,4", 2**40)
    assert (first, train, valid, stop) == (0, 3 * 2**37, 2**39, 2**40)


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31 + 1, 2**32 + 1, 2**40 + 7])
@pytest.mark.parametrize("samples", [1, 2**31 + 1, 2**33 + 5])
@pytest.mark.parametrize("seq_length", [1, 2048])
def test_epochs_of_any_size_are_planned_in_whole_numbers(tokens, samples, seq_length):
    plan = plan_epochs(tokens, samples, seq_length=seq_length, last_epoch_cutoff=0.95)
    assert plan.num_samples == (plan.num_epochs * tokens - 1) // seq_length >= samples
    assert plan.num_epochs == 1 or ((plan.num_epochs - 1) * tokens - 1) // seq_length < samples
    if plan.last_epoch_is_separate:
        before = ((plan.num_epochs - 1) * tokens - 1) // seq_length
        assert plan.shuffled_apart_from == before
        assert samples - before < int(0.95 * ((tokens - 1) // seq_length))


@pytest.mark.parametrize(
    ("samples", "dtype"), [(2**32 - 3, np.uint32), (2**32 - 2, np.int64), (2**40, np.int64)]
)
def test_numbers_of_samples_have_a_type_that_holds_them(samples, dtype, monkeypatch):
    """As Megatron chooses it; the array itself is left out."""
    asked = []

    def note(count, dtype):
        asked.append((count, dtype))
        return np.zeros(1, dtype)

    monkeypatch.setattr(gpt_dataset.np, "arange", note)
    plan = EpochPlan(1, samples, samples, samples, False)
    order = gpt_dataset._sample_order(plan, np.random.RandomState(1))
    assert asked == [(samples, dtype)]
    assert order.dtype == dtype


def test_a_blend_of_many_samples_counts_its_components_in_64_bits():
    for samples in (2**31 + 1, 2**33):
        assert samples_of_component(samples, 0.25) >= samples * 0.25 * 1.005
        assert samples_of_component(samples, 1.0) > samples
        assert list(draw_problems(["a", "b"], [1, 1 / samples], samples)) != []
        assert list(draw_problems(["a", "b"], [1, 3 / samples], samples)) == []
    for build in (build_blending_indices, build_blending_indices_with_python):
        assert build([0.5, 0.5], 4)[1].dtype == np.int64


@pytest.mark.parametrize("consumed", [2**31 - 8, 2**32 - 8, 2**33])
def test_samples_in_order_go_on_beyond_32_bits(consumed):
    ranks = [
        MegatronPretrainingSampler(
            total_samples=2**34,
            consumed_samples=consumed,
            micro_batch_size=4,
            data_parallel_rank=rank,
            data_parallel_size=2,
        )
        for rank in range(2)
    ]
    seen = []
    for _, one, other in zip(range(4), *ranks):
        seen += one + other
    assert seen == list(range(consumed, consumed + 32))
    assert len(ranks[0]) == (2**34 - consumed) // 8


@pytest.mark.parametrize("consumed", [2**31 + 3, 2**33 + 1, 2**35 + 5])
def test_a_shuffled_order_goes_on_after_any_number_of_epochs(consumed):
    def sampler(at):
        return MegatronPretrainingRandomSampler(
            total_samples=10,
            consumed_samples=at,
            micro_batch_size=1,
            data_parallel_rank=0,
            data_parallel_size=1,
            seed=3,
        )

    whole = [index for batch in sampler(consumed - consumed % 10) for index in batch]
    rest = [index for batch in sampler(consumed) for index in batch]
    assert sorted(whole) == list(range(10))
    assert rest == whole[consumed % 10 :]


@pytest.mark.parametrize(("total", "dtype"), [(2**32, np.uint32), (2**32 + 1, np.int64)])
def test_a_permutation_has_a_type_that_holds_its_numbers(total, dtype, monkeypatch):
    sampler = MegatronPretrainingRandomSampler(
        total_samples=total,
        consumed_samples=2**40,
        micro_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
        seed=3,
    )
    asked = []

    def note(count, dtype):
        asked.append((count, dtype))
        return np.zeros(1, dtype)

    monkeypatch.setattr(data_samplers.np, "arange", note)
    assert sampler._permutation(0).dtype == dtype
    assert asked == [(total, dtype)]
    assert len(sampler) == total - 2**40 % total
