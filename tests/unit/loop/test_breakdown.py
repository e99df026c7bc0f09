"""Where the time of steps went: classes that add up to the steps, on a CPU and on a GPU."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.loop.breakdown import (
    CLASSES,
    DATA,
    EXPOSED,
    IDLE,
    OPTIMIZER,
    OTHER,
    Breakdown,
    breakdown,
    late_ranks,
)
from megatron.spans import WAIT
from tests.support.examples import examples
from tests.unit.loop.test_overlap import event

HOST, GPU = "user_annotation", "gpu_user_annotation"
MICRO = 1e-6


def micros(found: Breakdown) -> dict[str, float]:
    return {kind: round(seconds / MICRO, 3) for kind, seconds in found.seconds.items() if seconds}


def test_every_moment_of_a_step_has_one_class() -> None:
    events = [
        event(HOST, "step 3", 0, 100),
        event(HOST, "step 4", 120, 150),
        event(HOST, "batch-generator", 0, 10),
        event("cpu_op", "aten::mm", 5, 20),
        event("cpu_op", "aten::scaled_dot_product_attention", 20, 40),
        event("cpu_op", "aten::bmm", 25, 35),
        event("cpu_op", "megatron::rms_norm", 40, 42),
        event("cpu_op", "aten::_softmax_backward_data", 42, 45),  # of scores in memory
        event("cpu_op", "aten::add", 45, 50),
        event(HOST, "dp all_reduce, 8 bytes", 30, 70, tid=9),
        event(HOST, WAIT, 50, 75),
        event(HOST, "optimizer", 80, 95),
        event("cpu_op", "megatron::adamw_step_", 80, 90),
        event("cpu_op", "aten::addmm", 110, 130),  # from before step 4
    ]
    found = breakdown(events)
    assert micros(found) == {
        DATA: 5,
        "matrix products": 15 + 10,
        "attention": 20 + 3,
        "norms": 2,
        OTHER: 5,
        EXPOSED: 25,
        OPTIMIZER: 10,
        IDLE: 5 + 10 + 20,
    }
    assert found.steps == 2
    assert found.whole == pytest.approx(130 * MICRO)
    assert found.computed == pytest.approx((130 - 5 - 25 - 35) * MICRO)
    assert found.hidden == pytest.approx(20 * MICRO)
    assert "matrix products                0.01 ms   19.2%" in found.lines()
    assert found.lines()[-1] == "communication, hidden          0.01 ms"


def test_on_a_gpu_kernels_have_the_classes_and_the_host_is_idle_time() -> None:
    events = [
        event(HOST, "step 3", 0, 10),
        event(GPU, "step 3", 20, 100, tid=7),
        event("cpu_op", "aten::mm", 0, 10),
        event("kernel", "sm90_xmma_gemm_bf16", 20, 50, tid=7),
        event("kernel", "flash_fwd_kernel", 50, 60, tid=7),
        event("kernel", "vectorized_elementwise_kernel", 60, 65, tid=7),
        event("kernel", "ncclDevKernel_AllReduce_Sum", 40, 80, tid=20),
        event(GPU, "dp all_reduce, 8 bytes", 40, 80, tid=20),
    ]
    expected = {"matrix products": 30, "attention": 10, OTHER: 5, EXPOSED: 15, IDLE: 20}
    assert micros(breakdown(events)) == expected


KINDS = st.sampled_from(
    [
        ("cpu_op", "aten::mm"),
        ("cpu_op", "aten::layer_norm"),
        ("cpu_op", "c10d::allreduce_"),
        (HOST, WAIT),
        (HOST, "optimizer"),
        (HOST, "batch-generator"),
        (HOST, "tp all_gather, 4 bytes"),
    ]
)


@given(
    st.lists(
        st.tuples(KINDS, st.integers(0, 40), st.integers(0, 9), st.integers(1, 2)), max_size=12
    )
)
@examples(200)
def test_classes_add_up_to_the_steps(drawn: list[tuple[tuple[str, str], int, int, int]]) -> None:
    events: list[dict[str, Any]] = [event(HOST, "step 1", 5, 25), event(HOST, "step 2", 25, 35)]
    events += [event(*kind, start, start + size, tid) for kind, start, size, tid in drawn]
    found = breakdown(events)
    assert found.whole == pytest.approx(30 * MICRO)
    assert all(found.seconds[kind] >= 0 for kind in CLASSES)


def test_a_trace_without_steps_says_nothing() -> None:
    found = breakdown([event("cpu_op", "aten::mm", 0, 10)])
    assert (found.steps, found.whole) == (0, 0)


def test_a_rank_that_computes_longer_than_others_is_named_with_its_reason() -> None:
    def rank(products: float, waits: float) -> Breakdown:
        nothing = dict.fromkeys(CLASSES, 0.0)
        return Breakdown(2, {**nothing, "matrix products": products, EXPOSED: waits}, 0.0)

    ranks = {"rank0": rank(0.1, 0.03), "rank1": rank(0.13, 0.05), "rank2": rank(0.1, 0.03)}
    assert late_ranks(ranks) == [
        "rank1 computed 15.00 ms a step longer than the median rank, most of it in: matrix products"
    ]
    assert late_ranks({"rank0": rank(0.1, 0.0), "rank1": rank(0.101, 0.0)}) == []
    assert late_ranks({"rank0": rank(0.1, 0.0)}) == []
