"""Checks of --compile and --cuda-graph: silent on a good plan, and their messages on a bad one."""

from typing import Any

import pytest
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from megatron import device
from megatron.config.runtime import DeviceKind
from megatron.preflight import compiling
from megatron.preflight.run import RunPlan
from tests.unit.preflight.plans import found, only, plan

CAPTURED = compiling.captured_steps_go_with_the_other_flags
GOOD: dict[str, Any] = {
    "compile": True,
    "hidden_dropout": 0.1,
    "recompute_granularity": "full",
    "cpu_offloading_num_layers": 1,
}


def compiled_plan(**flags: Any) -> RunPlan:
    return plan(world_size=2, **(GOOD | flags))


@pytest.mark.parametrize("check", compiling.CHECKS)
def test_a_good_plan_passes(check: Any) -> None:
    assert found(check, compiled_plan(tensor_model_parallel_size=2, sequence_parallel=True)) == []
    assert found(check, compiled_plan(pipeline_model_parallel_size=2)) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"deepspeed": True}, ["--deepspeed"]),
        ({"num_experts": 4, "add_bias_linear": False}, ["--num-experts 4", "a dense model"]),
        ({"attention_dropout": 0.1}, ["--attention-dropout 0.1", "use --attention-dropout 0"]),
        ({"bias_dropout_fusion": False}, ["--no-bias-dropout-fusion", "--hidden-dropout 0.1"]),
        (
            {"recompute_granularity": "selective"},
            ["--recompute-granularity selective", "use --recompute-granularity full"],
        ),
        ({"gradient_accumulation_fusion": False}, ["--no-gradient-accumulation-fusion"]),
        (
            {"data_parallel_sharding_strategy": "optim_grads_params"},
            ["--data-parallel-sharding-strategy optim_grads_params", "use optim_grads"],
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
            ["--pipeline-schedule zero-bubble", "use 1f1b"],
        ),
    ],
    ids=str,
)
def test_flags_that_cannot_be_traced_are_refused_by_name(
    flags: dict[str, Any], words: list[str]
) -> None:
    check = compiling.compiled_layers_go_with_the_other_flags
    only(found(check, compiled_plan(**flags)), "layers cannot be compiled", "--compile", *words)
    assert found(check, compiled_plan(**flags, compile=False)) == []


def test_a_missing_compiler_is_found_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    check = compiling.compilers_are_installed
    only(found(check, compiled_plan()), "needs a C++ compiler", "install g++")
    assert found(check, compiled_plan(compile=False)) == []


def test_missing_triton_is_found_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    check = compiling.compilers_are_installed
    only(found(check, compiled_plan(device=DeviceKind.AUTO)), "needs Triton", "pip install triton")
    assert found(check, compiled_plan(device=DeviceKind.CPU)) == []


def captured_plan(**flags: Any) -> RunPlan:
    return plan(world_size=2, **({"cuda_graph": True, "hidden_dropout": 0.1} | flags))


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
        {"recompute_granularity": "full", "compile": True},
        {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
    ],
    ids=str,
)
def test_a_good_plan_of_captured_steps_passes(flags: dict[str, Any]) -> None:
    assert found(CAPTURED, captured_plan(**flags)) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"deepspeed": True}, ["--deepspeed"]),
        ({"num_experts": 4, "add_bias_linear": False}, ["--num-experts 4", "a dense model"]),
        ({"attention_dropout": 0.1}, ["--attention-dropout 0.1", "use --attention-dropout 0"]),
        ({"cpu_offloading_num_layers": 1}, ["--cpu-offloading-num-layers", "recompute them"]),
        (
            {"checkpoint_in_cpu": True, "recompute_granularity": "full"},
            ["--checkpoint-in-cpu", "recompute them"],
        ),
        (
            {"data_parallel_sharding_strategy": "optim_grads"},
            ["--data-parallel-sharding-strategy optim_grads", "use optim"],
        ),
        (
            {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
            | {"overlap_param_gather": True},
            ["--overlap-param-gather"],
        ),
        ({"check_collectives": True}, ["--check-collectives"]),
        ({"log_timers_to_tensorboard": True}, ["--log-timers-to-tensorboard", "timers wait"]),
    ],
    ids=str,
)
def test_flags_whose_passes_ask_the_host_are_refused_by_name(
    flags: dict[str, Any], words: list[str]
) -> None:
    problem = "the passes of a step cannot be captured"
    only(found(CAPTURED, captured_plan(**flags)), problem, "--cuda-graph", *words)
    assert found(CAPTURED, captured_plan(**flags, cuda_graph=False)) == []
