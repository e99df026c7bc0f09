"""Every check of a run in FP8: silent on a good plan, and its message on a bad one."""

from typing import Any

import pytest

from megatron import device
from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.config.runtime import DeviceKind
from megatron.preflight import fp8
from megatron.preflight.run import RunPlan
from tests.unit.preflight.plans import found, only, plan

FP8: dict[str, Any] = {"fp8_format": "hybrid", "bf16": True, "hidden_size": 64}
SPLIT = {"tensor_model_parallel_size": 2}


def fp8_plan(**flags: Any) -> RunPlan:
    return plan(world_size=2, **(FP8 | flags))


@pytest.mark.parametrize("check", fp8.CHECKS)
def test_a_good_plan_passes(check: Any) -> None:
    assert found(check, plan(hidden_size=20, fp16=True)) == []
    assert found(check, fp8_plan(**SPLIT)) == []
    assert found(check, fp8_plan(fp8_recipe="mxfp8")) == []
    assert found(check, fp8_plan(fp64=True, bf16=False)) == []


@pytest.mark.parametrize("flags", [{"fp16": True}, {"fp64": False}])
def test_the_model_around_it_is_in_bfloat16(flags: dict[str, Any]) -> None:
    bad = fp8_plan(bf16=False, **flags)
    only(found(fp8.fp8_goes_with_the_other_flags, bad), "FP8 needs a model in bfloat16", "--bf16")


def test_parts_of_sequences_are_refused() -> None:
    on_ring = fp8_plan(tp_comm_overlap=True, sequence_parallel=True)
    only(found(fp8.fp8_goes_with_the_other_flags, on_ring), "leave --tp-comm-overlap out")


def test_deepspeed_is_refused_by_name_and_experts_are_not() -> None:
    by_deepspeed = fp8_plan(deepspeed=True)
    only(found(fp8.fp8_goes_with_the_other_flags, by_deepspeed), "DeepSpeed does not train in FP8")
    routed = fp8_plan(num_experts=4, add_bias_linear=False)
    assert found(fp8.fp8_goes_with_the_other_flags, routed) == []


def test_a_pattern_that_leaves_no_layer_is_refused() -> None:
    ends = {"first_last_layers_bf16": True}
    assert found(fp8.fp8_has_layers, fp8_plan(num_layers=3, **ends)) == []
    bad = found(fp8.fp8_has_layers, fp8_plan(**ends))
    only(bad, "no transformer layer is left for it", "--num-layers 2", "first 1 and the last 1")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hidden_size": 40}, ["multiples of 16", "--hidden-size 40"]),
        ({"ffn_hidden_size": 48, **SPLIT}, ["--ffn-hidden-size 24", "32 divides"]),
        ({"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 2, **SPLIT}, ["12"]),
        (
            {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 40, **SPLIT},
            ["--moe-ffn-hidden-size 20"],
        ),
        (
            {"num_experts": 4, "add_bias_linear": False, "moe_shared_expert_intermediate_size": 40},
            ["--moe-shared-expert-intermediate-size 40"],
        ),
        ({"fp8_recipe": "blockwise"}, ["multiples of 128", "--hidden-size 64"]),
        (
            {"fp8_recipe": "mxfp8", "ffn_hidden_size": 80},
            ["multiples of 32", "--ffn-hidden-size 80"],
        ),
    ],
)
def test_parts_of_weights_are_whole_blocks(flags: dict[str, Any], words: list[str]) -> None:
    only(found(fp8.fp8_scales_fit_the_weights, fp8_plan(**flags)), *words)


@pytest.mark.parametrize(
    ("recipe", "oldest"), [*zip(Fp8Recipe, [(8, 9), (8, 9), (9, 0), (9, 0), (10, 0)], strict=True)]
)
def test_a_device_that_cannot_is_refused(
    recipe: Fp8Recipe, oldest: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "name", lambda: "a GPU")
    here = fp8_plan(fp8_recipe=recipe.value, fp8_format="e4m3", device=DeviceKind.CUDA)
    monkeypatch.setattr(device, "capability", lambda: oldest)
    assert found(fp8.device_multiplies_fp8, here) == []
    monkeypatch.setattr(device, "capability", lambda: (oldest[0] - 1, 9))
    needed = f"the first one that can is {oldest[0]}.{oldest[1]}"
    only(found(fp8.device_multiplies_fp8, here), f"scales {recipe}", "a GPU", needed)
    on_cpu = fp8_plan(fp8_recipe=recipe.value)
    assert found(fp8.device_multiplies_fp8, on_cpu) == []
    monkeypatch.setattr(device, "capability", lambda: (12, 0))
    newer = found(fp8.device_multiplies_fp8, here)
    assert bool(newer) == (recipe is Fp8Recipe.BLOCKWISE)


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_formats_that_cuda_does_not_multiply_together_are_refused(
    recipe: Fp8Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cuda_is_available", lambda: True)
    monkeypatch.setattr(device, "name", lambda: "a GPU")
    capability = (10, 0) if recipe is Fp8Recipe.MXFP8 else (9, 0)
    monkeypatch.setattr(device, "capability", lambda: capability)
    hybrid = fp8_plan(fp8_recipe=recipe.value, device=DeviceKind.CUDA)
    errors = found(fp8.device_multiplies_fp8, hybrid)
    if recipe in (Fp8Recipe.BLOCKWISE, Fp8Recipe.MXFP8):
        only(errors, "in e4m3 alone on CUDA", "--fp8-format e4m3")
    else:
        assert errors == []


def test_a_recipe_needs_what_its_blocks_need() -> None:
    assert Fp8Config(fp8_format=Fp8Format.E4M3).fp8_recipe.multiple == 16
    assert [recipe.multiple for recipe in Fp8Recipe] == [16, 16, 16, 128, 32]
