"""Loads of experts, and their biases, on one rank; over several in tests/laws/layouts."""

import dataclasses

import torch
from torch import nn

from megatron.config.experts import RouterScoreFunction
from megatron.engine.expert_load import DROPPED, IDLE, MOST_LOADED, ExpertLoads
from megatron.model.experts.router import Router
from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import ScalarSums
from tests.support.models import tiny_build, tiny_config

SINGLE = ParallelContext.single()
CONFIG = tiny_config(
    num_layers=3,
    num_experts=4,
    add_bias_linear=False,
    moe_router_score_function=RouterScoreFunction.SIGMOID,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.25,
)


def stage_of(*layers: int) -> nn.Module:
    """A stage of layers that are nothing but routers, under their global names."""
    stage = nn.Module()
    stage.layers = nn.Module()
    for layer in layers:
        router = Router(CONFIG, tiny_build())
        assert router.expert_bias is not None
        nn.init.zeros_(router.expert_bias)
        stage.layers.add_module(str(layer), router)
    return stage


def routers_of(stage: nn.Module) -> list[Router]:
    return [module for module in stage.modules() if isinstance(module, Router)]


def biases_of(stage: nn.Module) -> list[list[float]]:
    biases = (router.expert_bias for router in routers_of(stage))
    return [bias.tolist() for bias in biases if bias is not None]


def test_busy_experts_are_moved_down_and_idle_ones_up_if_the_step_counts() -> None:
    stage = stage_of(0, 2)
    loads = ExpertLoads(stage, CONFIG, SINGLE)
    for applied, expected in (
        (False, [[0.0] * 4, [0.0] * 4]),
        (True, [[-0.25, 0.25, 0.25, 0.0], [0.0] * 4]),
        (True, [[-0.5, 0.5, 0.5, 0.0], [0.0] * 4]),
    ):
        first, second = routers_of(stage)
        for _ in range(2):  # micro-batches
            first.note(None, torch.tensor([3, 0, 0, 1, 0]))
        first.note(None, torch.tensor([2, 1, 0, 1, 0]))  # 8, 1, 0 and 3 in all
        second.note(None, torch.tensor([3, 3, 3, 3, 0]))
        sums = ScalarSums(SINGLE.world)
        loads.add_to(sums, sequence_parallel=False)
        reduced = sums.reduce()
        # The layer of another stage has sent its own: as busy as can be.
        (vector,) = reduced.values()
        vector[5:10] = torch.tensor([12.0, 0, 0, 0, 0])
        outcome = loads.finish(reduced, torch.tensor(applied))
        assert biases_of(stage) == expected
        assert float(outcome[MOST_LOADED]) == 4.0
        assert int(outcome[IDLE]) == 3 + 1
        assert DROPPED not in outcome


def test_what_was_counted_is_counted_once() -> None:
    stage = stage_of(1)
    (router,) = routers_of(stage)
    router.note(None, torch.tensor([1, 0, 0, 0, 5]))
    assert router.taken_load().tolist() == [1, 0, 0, 0, 5]
    assert router.taken_load().tolist() == [0, 0, 0, 0, 0]


def test_layers_without_experts_have_no_loads() -> None:
    config = dataclasses.replace(CONFIG, moe_layer_freq="[0,0,1]", moe_expert_capacity_factor=1.0)
    stage = stage_of(2)
    (router,) = routers_of(stage)
    router.note(None, torch.tensor([2, 2, 4, 0, 2]))
    sums, loads = ScalarSums(SINGLE.world), ExpertLoads(stage, config, SINGLE)
    loads.add_to(sums, sequence_parallel=False)
    outcome = loads.finish(sums.reduce(), torch.tensor(True))
    assert biases_of(stage) == [[0.0, 0.0, -0.25, 0.25]]
    assert float(outcome[MOST_LOADED]) == 2.0
    assert int(outcome[IDLE]) == 1
    assert float(outcome[DROPPED]) == 2 / 8
