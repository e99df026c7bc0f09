"""Tests of megatron.peers.goodput."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.peers.activity import DATA, EVALUATION, SAVE, START, STEP, Activity
from megatron.peers.goodput import Account, AccountKeeper, accounts_in, goodput, goodput_by_start
from tests.support.examples import examples


def account(first: int, iteration: int, *, step_s: float = 1.0, start_s: float = 5.0) -> Account:
    seconds = {STEP: (iteration - first) * step_s, START: start_s, SAVE: 2.0}
    return Account(0.0, 0.0, first, iteration, seconds)


def test_steps_that_a_later_start_repeats_are_lost() -> None:
    found = goodput([account(0, 25), account(20, 40)], began=0, ended=80)
    assert (found.kept, found.lost) == (40, 5)
    assert (found.starting, found.saves) == (10, 4)
    assert found.down == 80 - 45 - 14
    assert found.share == 0.5
    assert str(found).startswith("goodput 50.0% of 80.0 s in 2 starts; seconds: steps kept 40.0,")


def test_each_start_lasts_up_to_the_next() -> None:
    accounts = [account(0, 25)._replace(began=1.0), account(20, 40)._replace(began=50.0)]
    first, second = goodput_by_start(accounts, began=0, ended=80)
    assert (first.total, first.kept, first.lost) == (50, 20, 5)
    assert (second.total, second.kept, second.lost) == (30, 20, 0)
    assert second.down == 30 - 20 - 7


def test_a_start_may_repeat_all_of_the_one_before_and_more() -> None:
    found = goodput([account(0, 20), account(20, 30), account(10, 40)], began=0, ended=100)
    assert (found.kept, found.lost) == (10 + 30, 10 + 10)


def test_a_start_without_a_step_is_none_of_them() -> None:
    found = goodput([account(0, 0), account(0, 10)], began=0, ended=30)
    assert (found.kept, found.lost) == (10, 0)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5),
    st.floats(0.01, 10),
)
@examples(100)
def test_the_parts_add_up_and_each_iteration_is_kept_at_most_once(
    spans: list[tuple[int, int]], step_s: float
) -> None:
    accounts = [account(min(span), max(span), step_s=step_s) for span in spans]
    found = goodput(accounts, began=0, ended=10_000)
    parts = found.kept + found.lost + found.data + found.evaluation + found.saves
    assert parts + found.starting + found.down == pytest.approx(found.total)
    assert found.kept <= (max(map(max, spans)) + 1e-9) * step_s * 1.0001
    assert found.kept >= 0
    assert found.lost >= 0


def test_the_account_of_an_activity_comes_back(tmp_path: Path) -> None:
    before, activity = time.time(), Activity()
    keeper = AccountKeeper(str(tmp_path), activity, first=20)
    activity.step(21)
    with activity.during(EVALUATION):
        pass
    with activity.during(DATA):
        pass
    keeper.keep(21, now=True)
    keeper.keep(22)  # not due: a second has not passed
    (found,) = accounts_in(str(tmp_path))
    assert (found.first, found.iteration) == (20, 21)
    assert before - 0.1 <= found.began <= found.updated <= time.time() + 0.1
    assert set(found.seconds) == {START, STEP, EVALUATION, DATA}


def test_accounts_are_in_the_order_of_the_starts(tmp_path: Path) -> None:
    for first in range(3):
        AccountKeeper(str(tmp_path), Activity(), first).keep(first, now=True)
    assert [each.first for each in accounts_in(str(tmp_path))] == [0, 1, 2]
