"""Which checkpoints are deleted: never the last intact one, never because of a damaged one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.folder.retention import KEEP_ALL, FoundCheckpoint, Retention, redundant


def whole(*iterations, **losses):
    return [FoundCheckpoint(i, True, losses.get(f"at_{i}")) for i in iterations]


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (KEEP_ALL, []),
        (Retention(1), [40, 30, 20, 10]),
        (Retention(3), [20, 10]),
        (Retention(9), []),
        (Retention(1, every=20), [30, 10]),
        (Retention(1, every=7), [40, 30, 20, 10]),
        (Retention(2, best=1), [30, 10]),
        (Retention(1, best=2), [30, 20]),
        (Retention(1, every=30, best=1), [40, 10]),
    ],
)
def test_what_a_rule_keeps(rule, gone):
    found = whole(10, 20, 30, 40, 50, at_10=2.5, at_20=1.5, at_40=2.0)
    expected = gone
    if rule == Retention(1, best=2):  # 20 and 40 are the best
        expected = [30, 10]
    assert redundant(found, rule, newest=50) == expected


def test_of_equal_losses_the_newer_is_better():
    found = whole(10, 20, 30, at_10=1.0, at_20=1.0)
    assert redundant(found, Retention(1, best=1), newest=30) == [10]


def test_damaged_ones_do_not_count_as_kept():
    found = [*whole(10, 20), FoundCheckpoint(30, False), *whole(40)]
    assert redundant(found, Retention(2), newest=40) == [10]


@pytest.mark.parametrize(
    "found",
    [[*whole(10, 20), FoundCheckpoint(30, False)], whole(10, 20), []],
    ids=["damaged", "gone", "none"],
)
def test_nothing_goes_unless_the_newest_is_whole_and_there(found):
    assert redundant(found, Retention(1), newest=30) == []


def test_later_iterations_of_a_run_that_was_rolled_back_are_not_touched():
    assert redundant(whole(10, 20, 30, 90), Retention(1), newest=30) == [20, 10]


FOUND = st.builds(
    FoundCheckpoint,
    st.integers(0, 30),
    st.booleans(),
    st.none() | st.floats(0, 9, allow_nan=False),
)
RULES = st.builds(
    Retention, st.integers(1, 4), st.none() | st.integers(1, 7), st.none() | st.integers(1, 3)
)


@given(st.lists(FOUND, unique_by=lambda f: f.iteration), RULES, st.integers(0, 30))
def test_enough_whole_ones_and_all_that_is_promised_stay(found, rule, newest):
    gone = set(redundant(found, rule, newest=newest))
    left = [f for f in found if f.iteration not in gone]
    before = [f for f in found if f.is_whole and f.iteration <= newest]
    stays = [f for f in left if f.is_whole and f.iteration <= newest]
    assert len(stays) >= min(len(before), rule.last or 0)
    assert newest not in gone
    assert all(iteration < newest for iteration in gone)
    if before:
        assert max(f.iteration for f in before) == max(f.iteration for f in stays)
    losses = sorted(f.loss for f in before if f.loss is not None)
    if losses and rule.best:
        assert losses[0] in [f.loss for f in stays]
    if rule.every:
        assert not [i for i in gone if i % rule.every == 0]
