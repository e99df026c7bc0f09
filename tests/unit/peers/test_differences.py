"""Tests of megatron.peers.differences."""

import pytest

from megatron.peers.differences import differences, launch_problem, named


def test_equal_facts_differ_in_nothing() -> None:
    assert differences([{"seed": "1"}, {"seed": "1"}]) == ""


def test_values_are_named_with_those_who_hold_them() -> None:
    facts = [{"seed": "1", "torch": "2"}, {"seed": "1", "torch": "3"}, {"seed": "1"}]
    expected = "torch: 2 on rank 0, 3 on rank 1, (nothing) on rank 2"
    assert differences(facts) == expected


def test_what_some_may_lack_is_compared_between_the_others() -> None:
    assert differences([{"id of a": "1"}, {}], may_lack="id of") == ""
    assert differences([{"id of a": "1"}, {}, {"id of a": "2"}], may_lack="id of") == (
        "id of a: 1 on rank 0, 2 on rank 2"
    )


def test_ranks_that_were_started_otherwise_are_named_with_what_to_do() -> None:
    assert launch_problem([{"seed": "1"}, {"seed": "1"}]) is None
    problem = launch_problem([{"seed": "1"}, {"seed": "2"}])
    assert problem is not None
    assert problem.found == "seed: 1 on rank 0, 2 on rank 1"
    assert "the same flags, code, Python and torch" in problem.fix


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 9], "rank 0, 1, 2, 9"), (range(6), "6 ranks (0, 1, ... 5)")],
)
def test_many_ranks_are_counted(ranks: list[int], text: str) -> None:
    assert named(ranks) == text
