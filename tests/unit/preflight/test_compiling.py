"""Every check of a run with --compile: silent on a good plan, and its message on a bad one."""

from typing import Any

import pytest
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from megatron import device
from megatron.config.runtime import DeviceKind
from megatron.preflight import compiling
from megatron.preflight.run import RunPlan
from tests.unit.preflight.plans import found, only, plan

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
