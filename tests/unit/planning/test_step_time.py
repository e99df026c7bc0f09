"""The time of a step, from numbers that can be added up by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from megatron.initialize import tokenizer_of
from megatron.mpu.topology import Coord
from megatron.planning.calls import CallKind, CallSum
from megatron.planning.hardware import Hardware, Link
from megatron.planning.rehearsal import RankBytes, RankPlan, World
from megatron.planning.step_time import bubble, model_flops_share, step_time
from pretrain_gpt import gpt_task
from tests.support.tiny import tiny_run

# 10 FLOP/s are reached, and a byte takes a second within a node.
SLOW = Hardware(
    peak_flops={"bf16": 20.0},
    efficiency=0.5,
    memory_bandwidth=2.0,
    ranks_per_node=8,
    node=Link(bandwidth=1.0, latency=0.0),
    network=Link(bandwidth=0.5, latency=0.0),
)
MICRO_BATCHES = 4


def world_of(size: int = 2, **flags: Any) -> World:
    config = tiny_run("nowhere", bf16=True, **({"global_batch_size": 8} | flags))
    return replace(
        World.of(config, gpt_task(), tokenizer_of(config), size), microbatches=MICRO_BATCHES
    )


def plan_of(calls: Mapping[CallKind, CallSum] | None = None) -> RankPlan:
    return RankPlan(
        rank=0,
        coord=Coord(0, 0, 0, 0),
        bytes=RankBytes(weights=2, gradients=4, optimizer=6, peak=20),
        flops={"forward-compute": 400, "backward-compute": 800},
        calls=dict(calls or {}),
        saved={},
    )


def call(phase: str, axis: str, operation: str, size: int) -> dict[CallKind, CallSum]:
    return {CallKind(phase, axis, operation, (0, 1)): CallSum(1, size)}


def test_a_rank_alone_computes_and_updates() -> None:
    time = step_time(world_of(1), [plan_of()], SLOW)
    assert time.compute == 120
    assert time.update == (2 * 6 + 4 + 2) / 2
    assert time.bubble == pytest.approx(0)
    assert time.exposed == {}
    assert time.total == pytest.approx(129)


def test_communication_is_waited_for_by_axis() -> None:
    calls = call("forward-compute", "tp", "all_gather", 10)  # 1 of 2 parts of 20 bytes
    calls |= call("backward-compute", "tp", "reduce_scatter", 20)
    calls |= call("grads-all-reduce", "dp_cp", "all_reduce", 8)
    time = step_time(world_of(), [plan_of(calls)], SLOW)
    assert time.exposed == {"tp": 10 + 10, "dp_cp": 8}
    assert time.compute == 120
    assert time.total == pytest.approx(120 + 20 + 8 + time.update)


@pytest.mark.parametrize(
    ("flags", "hidden"),
    [
        ({}, 0),
        # That of the last micro-batch.
        ({"overlap_grad_reduce": True}, 80 / MICRO_BATCHES),
        (
            {
                "overlap_grad_reduce": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
            },
            50,
        ),
    ],
)
def test_what_replicas_overlap_hides_behind_computation(
    flags: dict[str, Any], hidden: float
) -> None:
    calls = call("backward-compute", "dp_cp", "reduce_scatter", 100)
    time = step_time(world_of(**flags), [plan_of(calls)], SLOW)
    left = 50 - hidden
    assert time.exposed == ({"dp_cp": pytest.approx(left)} if left else {})


def test_a_ring_hides_behind_attention_and_an_exchange_of_heads_does_not() -> None:
    world = world_of(context_parallel_size=2)
    ring = call("forward-compute", "cp", "send", 30)
    assert step_time(world, [plan_of(ring)], SLOW).exposed == {}
    heads = call("forward-compute", "cp", "all_to_all", 30)
    assert step_time(world, [plan_of(heads)], SLOW).exposed == {"cp": 15}


def test_parts_of_a_sequence_hide_behind_the_product_of_others() -> None:
    parts = call("forward-compute", "tp", "send", 30)
    assert step_time(world_of(), [plan_of(parts)], SLOW).exposed == {}


def test_stages_wait_for_each_other_as_the_schedule_says() -> None:
    world = world_of(num_layers=4, pipeline_model_parallel_size=2)
    stages = [plan_of(), plan_of()]
    time = step_time(world, stages, SLOW)
    assert bubble(world).bubble_share == pytest.approx(1 / (MICRO_BATCHES + 1))
    assert time.bubble == pytest.approx(120 / MICRO_BATCHES)
    assert time.total == pytest.approx(120 + 30 + time.update)
    messages = call("pipeline-exchange", "pp", "send", 5)
    assert step_time(world, [plan_of(messages), plan_of()], SLOW).bubble > time.bubble


def test_stages_that_compute_while_messages_travel_wait_less() -> None:
    messages = call("pipeline-exchange", "pp", "send", 5)
    waiting, computing = (
        step_time(
            world_of(
                num_layers=4,
                pipeline_model_parallel_size=2,
                pipeline_schedule="gpipe",
                overlap_p2p_communication=overlaps,
            ),
            [plan_of(messages), plan_of()],
            SLOW,
        ).bubble
        for overlaps in (False, True)
    )
    assert computing < waiting


def test_the_slowest_stage_decides() -> None:
    world = world_of(num_layers=4, pipeline_model_parallel_size=2)
    longer = replace(plan_of(), flops={"forward-compute": 500, "backward-compute": 900})
    slow = step_time(world, [longer, longer], SLOW)
    assert step_time(world, [plan_of(), longer], SLOW) == slow


def test_the_mfu_is_of_the_peak_of_all_ranks() -> None:
    assert model_flops_share(3.0, 4, world_of(), SLOW) == pytest.approx(12 / 40)
