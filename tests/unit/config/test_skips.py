"""Ranges of iterations to skip: merged where they touch, refused where they are none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.skips import skip_problems, skipped_ranges


def test_ranges_that_touch_or_overlap_are_one() -> None:
    assert skipped_ranges(["4-7", "2-2"]) == (range(2, 3), range(4, 8))
    assert skipped_ranges(["4-7", "1-3", "6-9"]) == (range(1, 10),)
    assert skipped_ranges([]) == ()


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=6))
def test_every_iteration_that_is_named_is_in_one_range(given_: list[tuple[int, int]]) -> None:
    ranges = skipped_ranges([f"{first}-{first + more}" for first, more in given_])
    wanted = {at for first, more in given_ for at in range(first, first + more + 1)}
    found = [at for each in ranges for at in each]
    assert sorted(wanted) == found


@pytest.mark.parametrize("word", ["5", "5-", "7-5", "0-3", "a-b", "1:3"])
def test_what_is_no_range_is_refused(word: str) -> None:
    (problem,) = skip_problems(["1-2", word])
    assert "a range of iterations to skip is not two numbers from 1" in str(problem)
    assert f"--skip-train-iteration-range {word}" in str(problem)
