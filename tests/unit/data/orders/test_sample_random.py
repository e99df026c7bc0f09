"""Numbers of a sample depend on the seed, its number and the use, and on nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.orders.sample_random import random_of_sample

SEEDS = st.integers(0, 2**32 - 1)
INDICES = st.integers(0, 2**40)


def draws(seed, index, use="x"):
    return random_of_sample(seed, index, use=use).randint(0, 2**31, size=4).tolist()


def test_the_numbers_are_the_same_for_ever():
    assert draws(1234, 5, "mlm") == [130959149, 1423670507, 770141070, 269683057]


@given(SEEDS, INDICES)
def test_a_sample_always_has_the_same_numbers(seed, index):
    expected = draws(seed, index)
    np.random.seed(0)
    draws(seed, index + 1)
    assert draws(seed, index) == expected


@given(SEEDS, INDICES, st.integers(1, 2**33))
def test_other_samples_seeds_and_uses_have_other_numbers(seed, index, step):
    numbers = draws(seed, index)
    assert draws(seed, index + step) != numbers
    assert draws((seed + 1) % 2**32, index) != numbers
    assert draws(seed, index, "y") != numbers


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="Seed must be between"):
        random_of_sample(-1, 0, use="x")
