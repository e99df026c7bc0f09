"""Every check of experts that are shared out: silent on a good plan, its message on a bad one."""

from typing import Any

import pytest

from megatron.config.experts import RouterScoreFunction
from megatron.preflight import experts
from tests.unit.preflight.plans import found, only, plan

EXPERTS: dict[str, Any] = {"num_experts": 4, "add_bias_linear": False}
SHARED_OUT: dict[str, Any] = {**EXPERTS, "expert_model_parallel_size": 2}


@pytest.mark.parametrize("check", experts.CHECKS)
def test_a_good_plan_passes(check: Any) -> None:
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for flags in (
        {},
        EXPERTS,
        {**EXPERTS, **split},
        {**EXPERTS, **split, "expert_tensor_parallel_size": 2},
        SHARED_OUT,
        {**SHARED_OUT, **split, "expert_tensor_parallel_size": 1},
        {**SHARED_OUT, "expert_tensor_parallel_size": 2},
        {**SHARED_OUT, **split},
        {**EXPERTS, **split, "expert_tensor_parallel_size": 1},
        {**SHARED_OUT, "context_parallel_size": 4, "expert_model_parallel_size": 4},
    ):
        assert found(check, plan(world_size=4, **flags)) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_experts": None}, ["no experts to share out"]),
        ({"num_experts": 5}, ["cannot be shared out evenly", "--num-experts 5"]),
        (
            {"tensor_model_parallel_size": 2},
            ["would send the same tokens", "add --sequence-parallel"],
        ),
        (
            {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 4, "swiglu": True}
            | {"moe_ffn_hidden_size": 6},
            ["matrices of an expert cannot be shared out evenly", "width 6", "such as 1"],
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
            ["do not divide into groups", "4 ranks", "--expert-tensor-parallel-size 1"],
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_experts": 4},
            ["do not divide into groups that share experts", "1 ranks", "divides 1"],
        ),
    ],
    ids=str,
)
def test_experts_that_cannot_be_shared_out_are_refused(
    flags: dict[str, Any], words: list[str]
) -> None:
    bad = plan(world_size=4, **SHARED_OUT | flags)
    only(found(experts.experts_can_be_shared_out, bad), *words)


@pytest.mark.parametrize(
    ("flags", "given"),
    [({"deepspeed": True}, "--deepspeed"), ({"fp8_format": "e4m3", "bf16": True}, "--fp8-format")],
)
def test_engines_that_cannot_share_experts_out_refuse_it(flags: dict[str, Any], given: str) -> None:
    check = experts.engine_can_share_experts_out
    only(found(check, plan(world_size=2, **SHARED_OUT, **flags)), "cannot be shared out", given)
    assert found(check, plan(world_size=2, **EXPERTS, **flags)) == []
    in_parts = {**EXPERTS, "expert_tensor_parallel_size": 2}
    only(found(check, plan(world_size=2, **in_parts, **flags)), "cannot be shared out", given)


def test_nothing_can_be_computed_beside_an_exchange_without_a_shared_expert() -> None:
    check, overlap = experts.shared_expert_can_be_overlapped, {"moe_shared_expert_overlap": True}
    for flags in ({}, EXPERTS):
        only(found(check, plan(**flags, **overlap)), "no shared expert", "give the width")
    width = {"moe_shared_expert_intermediate_size": 8}
    assert found(check, plan(**EXPERTS, **width, **overlap)) == []


def test_an_engine_that_moves_no_biases_is_refused_with_them() -> None:
    biased = {
        **EXPERTS,
        "moe_router_score_function": RouterScoreFunction.SIGMOID,
        "moe_router_enable_expert_bias": True,
    }
    check = experts.engine_can_balance_experts_by_biases
    only(found(check, plan(**biased, deepspeed=True)), "moves the biases", "--deepspeed")
    assert found(check, plan(**biased)) == []
    assert found(check, plan(**EXPERTS, deepspeed=True)) == []
