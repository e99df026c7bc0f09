"""Ranks wait for one that works however long it takes, and not for one that fell silent."""

import time

import pytest
import torch.distributed as dist

from megatron.errors import MachineError
from megatron.mpu import progress_barrier
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.progress_barrier import ProgressBarrier
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks

PATIENCE_S = 2.0  # a loaded machine may hold up a rank for a second


def world() -> Group:
    return ParallelContext.build(Topology(1, 1, dist.get_world_size())).world


def work_for_long(beats: int) -> float:
    progress_barrier._BEAT_S = 0.0
    group = world()
    barrier = ProgressBarrier(group, patience_s=PATIENCE_S)
    began = time.monotonic()
    if group.is_first:
        for number in range(beats):
            time.sleep(PATIENCE_S / 8)
            barrier.report_progress(f"counting: {number}")
    barrier.wait()
    return time.monotonic() - began


def test_ranks_wait_for_one_at_work_for_longer_than_their_patience() -> None:
    waited = run_on_ranks(3, work_for_long, 16)
    assert min(waited) >= 2 * PATIENCE_S


def meet_often(rounds: int) -> list[float]:
    group = world()
    barrier = ProgressBarrier(group, patience_s=20.0)
    left = []
    for number in range(rounds):
        arrived = time.monotonic()
        if number % group.size == group.rank:
            time.sleep(0.1)
            arrived = time.monotonic()
        barrier.wait()
        left.append(arrived)
        left.append(time.monotonic())
    return left


def test_nobody_leaves_before_all_are_there_in_any_round_of_any_meeting() -> None:
    """CLOCK_MONOTONIC is that of the machine, so that moments of processes can be compared."""
    for _ in range(2):
        ranks = run_on_ranks(3, meet_often, 6)
        for round_ in range(6):
            last_arrival = max(times[2 * round_] for times in ranks)
            first_leave = min(times[2 * round_ + 1] for times in ranks)
            assert first_leave >= last_arrival


def second_meeting_of_the_same_processes() -> float:
    group = world()
    ProgressBarrier(group, patience_s=20.0).wait()
    barrier = ProgressBarrier(group, patience_s=20.0)
    began = time.monotonic()
    if group.is_first:
        time.sleep(0.5)
    barrier.wait()
    return time.monotonic() - began


def test_a_second_meeting_does_not_find_the_traces_of_the_first() -> None:
    assert min(run_on_ranks(2, second_meeting_of_the_same_processes)) >= 0.4


def wait_for_one_that_fell_silent() -> str:
    progress_barrier._BEAT_S = 0.0
    group = world()
    barrier = ProgressBarrier(group, patience_s=PATIENCE_S)
    if group.is_first:
        barrier.report_progress("verifying P.bin: 1.00 of 9.00 GiB")
        time.sleep(2 * PATIENCE_S)
        return ""
    with pytest.raises(MachineError) as raised:
        barrier.wait()
    return str(raised.value)


def test_silence_ends_the_wait_and_the_last_word_is_said() -> None:
    _, *messages = run_on_ranks(3, wait_for_one_that_fell_silent)
    for text in messages:
        assert "the ranks did not meet in time" in text
        assert "for rank 0 (verifying P.bin: 1.00 of 9.00 GiB)" in text
        assert "--distributed-timeout-minutes" in text


def say_what_is_waited_for() -> list[str]:
    progress_barrier._BEAT_S = progress_barrier._LOG_S = 0.0
    messages: list[str] = []
    progress_barrier.log.info = messages.append  # type: ignore[assignment]
    group = world()
    barrier = ProgressBarrier(group, patience_s=4.0)
    if group.rank == 1:
        for number in range(8):
            barrier.report_progress(f"counting: {number}")
            time.sleep(0.3)
    barrier.wait()
    return messages


def test_ranks_that_wait_say_for_whom_and_what_it_does() -> None:
    waiting, working = run_on_ranks(2, say_what_is_waited_for)
    assert waiting[0].startswith("waiting for rank 1 (counting: ")
    assert working == []


def test_one_rank_meets_itself() -> None:
    barrier = ProgressBarrier(Group(ranks=(0,), rank=0), patience_s=0.0)
    barrier.report_progress("nothing")
    barrier.wait()


def test_many_that_are_missing_are_counted() -> None:
    absent = [progress_barrier._Absent(rank, 0, "") for rank in range(12)]
    assert progress_barrier._named(absent).endswith("rank 7 and 4 more ranks")
