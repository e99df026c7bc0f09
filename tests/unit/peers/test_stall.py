"""Tests of megatron.peers.stall: who is silent, who is stuck, and who only waits."""

import json
import os

import pytest
import torch.distributed as dist

from megatron.peers import native_stacks, stall
from megatron.peers.activity import END, START, STEP, Activity
from megatron.peers.records import Beat
from megatron.peers.stacks import ProcessName
from megatron.peers.stall import CLOSED, Neighbour, StallLimits, StallWatch
from tests.conftest import Clock

LIMITS = StallLimits(named_s=4, silent_s=8, still_s=20, start_s=600)
ELSEWHERE = ProcessName("elsewhere 1 2", 7, 9)
STALL = "megatron/stall"


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr("megatron.peers.stall.log.error", logged.append)
    monkeypatch.setattr(native_stacks, "stacks_of", lambda process: f"stacks of {process.pid}")
    return logged


def beat(number: int, section: str = STEP, *, limit_s: float = 4.0) -> Beat:
    return Beat(number, section, 12, limit_s, ELSEWHERE)


def neighbour(last: Beat) -> Neighbour:
    """Rank 3, which gave its last sign of life at second 100."""
    found = Neighbour(3, LIMITS)
    found.hear(last, 100.0)
    return found


@pytest.mark.parametrize(
    ("seconds", "is_named", "is_final"),
    [(3.9, False, False), (4.1, True, False), (8.1, True, True)],
)
def test_a_silent_rank_is_named_and_then_ends_the_run(
    seconds: float, is_named: bool, is_final: bool
) -> None:
    found = neighbour(beat(1)).stall(100 + seconds)
    assert (found is not None, found is not None and found.is_final) == (is_named, is_final)
    if found is not None:
        assert found.rank == 3
        assert found.message.startswith(f"no sign of life for {seconds:.0f} s, in step 12")


def test_a_rank_whose_steps_are_long_may_be_silent_for_five_of_them() -> None:
    long_steps = neighbour(beat(1, limit_s=50))
    assert long_steps.stall(149) is None
    found = long_steps.stall(151)
    assert found is not None
    assert not found.is_final
    found = long_steps.stall(201)
    assert found is not None
    assert found.is_final, "after twice as long"


@pytest.mark.parametrize("section", [START, END])
def test_a_rank_outside_of_its_steps_may_be_silent_for_minutes(section: str) -> None:
    starting = neighbour(beat(1, section))
    assert starting.stall(579) is None
    found = starting.stall(581)
    assert found is not None
    assert not found.is_final, "its stacks are printed before collectives time out"
    found = starting.stall(701)
    assert found is not None
    assert found.is_final


def test_a_rank_that_has_left_is_not_silent() -> None:
    assert neighbour(beat(1, CLOSED)).stall(10_000) is None


def test_signs_of_life_are_those_that_change() -> None:
    found = neighbour(beat(1))
    found.hear(beat(1), 103)
    assert found.stall(105) is not None, "the same one again is none"
    found.hear(beat(2), 105)
    assert found.stall(108) is None


def test_a_process_of_this_machine_that_has_ended_is_known_at_once() -> None:
    ended = ProcessName.own()._replace(pid=2**22 + 1)  # beyond the largest pid
    found = neighbour(beat(1)._replace(process=ended)).stall(100.1)
    assert found is not None
    assert found.is_final
    assert "has ended without a message" in found.message


def watches(
    activity: Activity, limits: StallLimits = LIMITS, *, ranks: int = 2
) -> list[StallWatch]:
    """Ranks that share a store."""
    store = dist.HashStore()
    return [StallWatch(store, rank, ranks, activity, limits) for rank in range(ranks)]


def stepping(clock: Clock) -> Activity:
    """A main thread within its fifth step, whose steps take a second."""
    activity = Activity()
    for iteration in range(1, 6):
        activity.step(iteration)
        clock.now += 1
    return activity


def test_ranks_that_beat_have_not_stalled(clock: Clock, errors: list[str]) -> None:
    activity = stepping(clock)
    first, second = watches(activity)
    for iteration in range(6, 30):
        activity.step(iteration)
        clock.now += 1
        assert first.poll() is None
        assert second.poll() is None
    assert not errors


def test_the_rank_before_a_silent_one_tells_all_of_it_once(clock: Clock, errors: list[str]) -> None:
    activity = stepping(clock)
    first, second = watches(activity)
    for _ in range(2):
        second.poll()
        first.poll()
    for iteration in range(6, 11):  # the second one is silent from here on
        activity.step(iteration)
        clock.now += 1
        assert first.poll() is None
    first.poll()
    message, _ = errors
    assert "the run has stalled: rank 1: no sign of life for" in message
    assert "\nthis rank is at " in message
    assert "\nno native stacks" in message or "\nnative code, innermost frame first:" in message
    errors.clear()
    second._polled_at = None
    second.poll()  # it goes on: it reads of itself, and the first one takes it back
    first.poll()
    assert any("rank 1 goes on" in each for each in errors)
    assert not first._store.check([STALL])


def test_a_rank_that_never_polls_is_named_too(clock: Clock, errors: list[str]) -> None:
    first, _ = watches(Activity())
    first.poll()
    clock.now += 1 + LIMITS.start_s
    first._polled_at = clock.now
    found = first.poll()
    assert found is not None
    assert (found.rank, found.is_final) == (1, True)


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_one_rank_of_its_machine_asks_a_silent_one_for_its_stacks(
    host: str, clock: Clock, errors: list[str]
) -> None:
    activity = stepping(clock)
    first, silent, third = watches(activity, ranks=3)
    silent._process = ELSEWHERE if host == "elsewhere" else ProcessName.of(os.getppid())
    asked = f"rank 1 was here:\nstacks of {silent._process.pid}"
    for _ in range(2):  # it stalls, goes on, and stalls again
        errors.clear()
        for each in (third, silent, first):
            each._polled_at = None
            each.poll()
        for iteration in range(6, 12):
            activity.step(iteration)
            clock.now += 1
            first.poll()
            third._show()
        assert errors.count(asked) == (host == "here")
        assert any("the run has stalled: rank 1" in error for error in errors)


def test_the_run_ends_by_the_rank_that_waits_longest_for_its_neighbour(clock: Clock) -> None:
    activity = stepping(clock)
    first, second = watches(activity)
    second.poll()
    found = first.poll()
    while found is None and clock.now < 130:
        clock.now += 1
        activity.step(activity.now().iteration + 1)
        found = first.poll()
    assert found is not None
    assert found.is_final
    assert found.rank == 1
    assert 10 <= found.seconds <= 12, "twice five steps"


def test_a_pause_of_this_process_is_none_of_its_neighbour(clock: Clock) -> None:
    activity = stepping(clock)
    first, second = watches(activity)
    second.poll()
    first.poll()
    clock.now += 3600
    activity.step(6)
    assert first.poll() is None, "a suspended laptop"


def still(clock: Clock, monkeypatch: pytest.MonkeyPatch, waits_for: str | None) -> StallWatch:
    """The first rank, whose step takes 30 seconds so far."""
    monkeypatch.setattr(stall, "main_thread_waits_for", lambda: waits_for)
    activity = stepping(clock)
    first, second = watches(activity)
    for _ in range(30):
        clock.now += 1
        second._write(STEP, 5)
        first._next.hear(first.beat_of(1), clock.now)
    first._polled_at = clock.now
    return first


def test_a_rank_without_progress_by_its_own_doing_names_itself(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, errors: list[str]
) -> None:
    found = still(clock, monkeypatch, None).poll()
    assert found is not None
    assert (found.rank, found.is_final) == (0, True)
    assert found.message.startswith("no progress for 31 s, in step 5: ")
    assert " in main_thread_place (process " in found.message  # this test polls by itself
    assert "the run has stalled: rank 0" in errors[0]


def test_a_rank_that_waits_leaves_it_to_the_one_that_it_waits_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = still(clock, monkeypatch, "other ranks, in all_reduce")
    patient._limits = LIMITS._replace(still_s=None)
    assert patient.poll() is None
    assert not patient._store.check([STALL])


def test_where_all_wait_for_each_other_the_run_ends_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = still(clock, monkeypatch, "other ranks, in all_reduce").poll()
    assert found is not None
    assert found.message.startswith("waits for other ranks, in all_reduce since 31 s, in step 5")


def test_leaving_is_written_down(clock: Clock) -> None:
    activity = stepping(clock)
    first, second = watches(activity)
    second.poll()
    first.poll()
    second.close()
    clock.now += 1
    first.poll()
    clock.now += 1
    for _ in range(20):
        clock.now += 1
        activity.step(9)
        assert first.poll() is None
    assert json.loads(first._store.get("megatron/beat/1"))[1] == CLOSED
