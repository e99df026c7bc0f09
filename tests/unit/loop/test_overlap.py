"""What ran beside what: the arithmetic of stretches of time, and events as profilers write them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.loop.overlap import (
    GroupOverlap,
    Interval,
    common,
    length,
    overlaps,
    union,
    without,
)
from megatron.spans import WAIT
from tests.support.examples import examples

INTERVALS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(lambda at: Interval(at[0], sum(at))),
    max_size=8,
)


def ticks(intervals: Sequence[Interval]) -> set[int]:
    """The whole units of time in `intervals`."""
    return {at for start, stop in intervals for at in range(int(start), int(stop))}


@given(INTERVALS, INTERVALS)
@examples(300)
def test_stretches_of_time_are_sets(one: list[Interval], other: list[Interval]) -> None:
    first, second = union(one), union(other)
    assert ticks(first) == ticks(one)
    assert length(first) == len(ticks(one))
    assert all(before.stop < after.start for before, after in pairwise(first))
    both, rest = common(first, second), without(first, second)
    assert ticks(both) == ticks(one) & ticks(other)
    assert ticks(rest) == ticks(one) - ticks(other)
    assert length(both) + length(rest) == pytest.approx(length(first))


def event(cat: str, name: str, start: int, stop: int, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": stop - start, "tid": tid}


def test_operators_run_beside_communication_and_waits_do_not() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "step 3", 0, 100),
        event("user_annotation", "dp all_reduce, 8 bytes", 10, 30),
        event("user_annotation", "dp all_reduce, 16 bytes", 20, 50),
        event("user_annotation", "tp all_gather, 4 bytes", 60, 70),
        event("user_annotation", "gloo:all_reduce", 12, 29, tid=9),
        event("cpu_op", "c10d::allreduce_", 10, 12),
        event("cpu_op", "megatron::opaque_linear", 5, 45),
        event("cpu_op", "aten::mm", 14, 25),
        event("user_annotation", WAIT, 35, 50),
        event("cpu_op", "autograd::engine::evaluate_function", 0, 100),
        event("cpu_op", "aten::empty", 64, 64),
    ]
    dp, tp = overlaps(events)
    # In 10 to 50; computed from 5 to 35, but for the call at 10 to 12.
    assert dp == GroupOverlap("dp", 2, 24, pytest.approx(40e-6), pytest.approx(23e-6))
    assert tp == GroupOverlap("tp", 1, 4, pytest.approx(10e-6), 0)
    assert str(dp) == "dp: overlapped 57% of 0.0 ms (2 calls, 0.0 MB)"


def test_a_wait_of_one_thread_takes_nothing_from_another() -> None:
    events = [
        event("user_annotation", "dp all_reduce, 8 bytes", 0, 10),
        event("cpu_op", "aten::mm", 0, 10, tid=2),
        event("user_annotation", WAIT, 0, 10, tid=1),
    ]
    (dp,) = overlaps(events)
    assert dp.overlapped == pytest.approx(dp.seconds)


def test_on_a_gpu_kernels_count_and_the_host_does_not() -> None:
    events = [
        event("user_annotation", "tp reduce_scatter, 8 bytes", 0, 2),
        event("cpu_op", "aten::mm", 0, 100),
        event("gpu_user_annotation", "tp reduce_scatter, 8 bytes", 40, 60, tid=20),
        event("kernel", "ncclDevKernel_ReduceScatter_Sum", 40, 60, tid=20),
        event("kernel", "sm90_xmma_gemm", 50, 55, tid=7),
    ]
    (tp,) = overlaps(events)
    assert tp == GroupOverlap("tp", 1, 8, pytest.approx(20e-6), pytest.approx(5e-6))


def test_nothing_is_said_of_a_rank_alone() -> None:
    assert overlaps([event("cpu_op", "aten::mm", 0, 1)]) == []
