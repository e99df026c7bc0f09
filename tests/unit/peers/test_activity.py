"""Tests of megatron.peers.activity."""

from contextlib import nullcontext

import pytest

from megatron.peers.activity import DATA, EVALUATION, HOOKS, START, STEP, Activity, StepTimes
from tests.conftest import Clock


def stepped(clock: Clock, *seconds: float) -> Activity:
    """An activity with steps of these lengths, at the beginning of another one."""
    activity = Activity()
    for iteration, each in enumerate(seconds, 1):
        activity.step(iteration)
        clock.now += each
    activity.step(len(seconds) + 1)
    return activity


def test_the_seconds_of_all_sections_add_up_to_the_time_that_passed(clock: Clock) -> None:
    activity = Activity()
    clock.now += 3
    activity.step(1)
    clock.now += 2
    with activity.during(DATA):
        clock.now += 1
    clock.now += 4
    with activity.during(EVALUATION):
        clock.now += 10
    assert activity.seconds() == {START: 3, STEP: 6, DATA: 1, EVALUATION: 10}
    clock.now += 0.5
    assert sum(activity.seconds().values()) == clock.now - 100


def test_a_section_inside_another_goes_back_to_it(clock: Clock) -> None:
    activity = stepped(clock)
    with activity.during(EVALUATION):
        with activity.during(DATA):
            assert activity.now().section == DATA
        assert activity.now().section == EVALUATION
    assert str(activity.now()) == "step 1"


def test_no_step_is_too_long_before_three_are_known(clock: Clock) -> None:
    assert stepped(clock, 1, 1).step_limit(4) is None


@pytest.mark.parametrize(("step_s", "limit"), [(0.1, 4), (3.0, 15)])
def test_five_steps_are_too_long_and_a_least_time(clock: Clock, step_s: float, limit: int) -> None:
    slow_first = stepped(clock, 100, step_s, step_s, step_s)
    assert slow_first.step_limit(4) == pytest.approx(limit)


def test_an_evaluation_is_no_part_of_its_step_and_a_wait_for_data_is(clock: Clock) -> None:
    activity = Activity()
    for iteration in range(1, 6):
        activity.step(iteration)
        clock.now += 1
        with activity.during(DATA):
            clock.now += 1
        with activity.during(EVALUATION):
            clock.now += 50
    assert activity.step_limit(0) == pytest.approx(10)


def test_hooks_and_what_they_do_are_no_part_of_a_step_and_counted_once(clock: Clock) -> None:
    activity = Activity()
    for iteration in range(1, 6):
        activity.step(iteration)
        clock.now += 1
        with activity.during(HOOKS):
            clock.now += 1
            with activity.during(EVALUATION), activity.during(DATA):
                clock.now += 50
    assert activity.step_limit(0) == pytest.approx(5)
    assert activity.seconds() == {START: 0, STEP: 5, HOOKS: 5, EVALUATION: 0, DATA: 250}


def test_after_the_last_step_nothing_is_a_step(clock: Clock) -> None:
    activity = stepped(clock, 1, 1, 1)
    activity.end()
    assert str(activity.now()) == "after the steps"


def test_progress_is_counted_from_the_last_change(clock: Clock) -> None:
    activity = stepped(clock, 1)
    clock.now += 7
    assert activity.now().seconds == 7
    activity.seconds()
    assert activity.now().seconds == 7, "asking is no progress"


def test_waits_are_counted_within_steps_alone(clock: Clock) -> None:
    activity = stepped(clock, 2.0)
    for section in (None, DATA, EVALUATION):
        with activity.during(section) if section else nullcontext():
            clock.now += 1
            with activity.waiting():
                clock.now += 4
    # 2 s in the first step; 1 s and a wait of 4 s in the second one; 5 s for data.
    assert activity.step_times() == StepTimes(computing=3, data=5, peers=4)
    with activity.during(EVALUATION), activity.during(DATA):
        clock.now += 7
    assert activity.step_times().data == 5


def test_a_wait_for_others_is_no_progress(clock: Clock) -> None:
    activity = stepped(clock, 2.0)
    with activity.waiting():
        clock.now += 4
    assert activity.now().seconds == 4


def test_times_since_others_are_their_differences() -> None:
    assert StepTimes(5, 4, 3).since(StepTimes(1, 1, 1)) == StepTimes(4, 3, 2)


def test_memory_is_marked_where_it_rises_and_looked_at_outside_of_steps_alone() -> None:
    peak, looked = 5, 0

    def peak_bytes() -> int:
        nonlocal looked
        looked += 1
        return peak

    activity = Activity(peak_bytes)
    activity.step(1)
    assert activity.memory_marks() == {START: 5}
    looked, peak = 0, 9
    activity.step(2)
    with activity.during(DATA):
        pass
    assert looked == 0
    with activity.during(EVALUATION):
        peak = 12
    assert activity.memory_marks() == {START: 5, STEP: 9, EVALUATION: 12}
    activity.step(3)
    peak = 15
    assert activity.memory_marks() == {START: 5, STEP: 15, EVALUATION: 12}
