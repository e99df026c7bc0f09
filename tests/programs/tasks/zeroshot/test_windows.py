"""Every token of a text is scored once, with as much context as a window can give it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from tasks.zeroshot.windows import overlapping_windows, rolling_windows


@given(st.integers(2, 200), st.integers(1, 40), st.data())
def test_each_target_stands_in_one_window(count: int, length: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, length))
    tokens = list(range(1000, 1000 + count))
    rows = overlapping_windows(tokens, length=length, step=step)
    scored = [token for row in rows for token in row.tokens[row.first :]]
    assert scored == tokens[1:]
    for row in rows:
        assert len(row.tokens) - 1 <= length
        assert list(row.tokens) == list(range(row.tokens[0], row.tokens[0] + len(row.tokens)))
        # But for the first window, everything has the context that the step leaves.
        assert row.tokens[0] == 1000 or row.first == length - step + 1


def test_windows_that_do_not_overlap_are_the_text_cut_up() -> None:
    rows = overlapping_windows(list(range(8)), length=3, step=3)
    assert [row.tokens for row in rows] == [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7)]
    assert {row.first for row in rows} == {1}


@pytest.mark.parametrize("step", [0, 5])
def test_a_step_beyond_the_window_is_refused(step: int) -> None:
    with pytest.raises(ConfigError, match="windows cannot advance by that much"):
        overlapping_windows([1, 2, 3], length=4, step=step)


@given(st.integers(0, 100), st.integers(1, 20))
def test_rolling_windows_score_every_token_once(count: int, length: int) -> None:
    tokens = list(range(1000, 1000 + count))
    rows = rolling_windows(tokens, prefix=7, length=length)
    assert [token for row in rows for token in row.tokens[row.first :]] == tokens
    for at, row in enumerate(rows):
        assert len(row.tokens) - 1 <= length
        assert (row.tokens[0] == 7) == (at == 0)
        assert at == 0 or len(row.tokens) - 1 == length  # as much context as fits
