"""Each proof that a run in FP8 is one, and what breaks it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron import log
from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.engine import fp8
from megatron.engine.base import StepPlan
from megatron.engine.build import build_engine
from megatron.engine.fp8 import Decision, FirstStep, decisions, probe, summary
from megatron.engine.native import NativeEngine
from megatron.errors import ConfigError, MachineError
from megatron.model.specs import ModelBuild
from megatron.model_build import model_build
from megatron.ops import fp8_products as products
from megatron.ops.fp8_products import Fp8Products
from megatron.ops.quantize import Quantized, dequantize
from pretrain_bert import bert_task
from pretrain_gpt import gpt_task
from tests.support.tiny import TOKENS_PER_SAMPLE, tiny_run
from tests.unit.engine.engines import runtime_of, tiny_batches, tiny_engine

FP8: dict[str, Any] = {"fp8_format": "hybrid", "hidden_size": 32}
ROUTED = {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 16}
LINEAR = ("attention.qkv", "attention.output", "mlp.fc1", "mlp.fc2")


def built(**flags: Any) -> ModelBuild:
    return model_build(runtime_of(tiny_run("nowhere", **FP8, **flags)))


def table_of(**flags: Any) -> dict[str, str | None]:
    runtime = runtime_of(tiny_run("nowhere", **FP8, **flags))
    return dict(decisions(gpt_task().layers(runtime.config.model, model_build(runtime))))


def step(engine: NativeEngine, count: int = 2) -> None:
    batches = iter(tiny_batches(count))
    engine.train_step(batches, StepPlan(count, count, 0.01, 0.0, TOKENS_PER_SAMPLE, 0))


def test_linear_layers_of_blocks_are_in_fp8_and_nothing_else() -> None:
    table = table_of(untie_embeddings_and_output_weights=True)
    inside = {f"layers.{i}.{name}" for i in range(2) for name in LINEAR}
    assert {name for name, reason in table.items() if reason is None} == inside
    outside = {"embedding.word", "embedding.position", "output"}
    assert {name for name, reason in table.items() if reason} == outside


def test_experts_are_in_fp8_and_their_router_is_not() -> None:
    table = table_of(**ROUTED)
    inside = {f"layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("fc1", "fc2")}
    assert all(table[name] is None for name in inside)
    assert table["layers.0.mlp.router"] == "not a linear layer of attention, MLP or experts"


def test_first_and_last_layers_are_out_with_their_reason() -> None:
    table = table_of(num_layers=4, first_last_layers_bf16=True)
    for layer, is_out in enumerate((True, False, False, True)):
        for name in LINEAR:
            reason = table[f"layers.{layer}.{name}"]
            assert (reason is not None) == is_out
            assert reason is None or "--first-last-layers-bf16" in reason


def test_a_bert_has_the_same_layers_in_fp8() -> None:
    runtime = runtime_of(tiny_run("nowhere", **FP8))
    table = dict(decisions(bert_task().layers(runtime.config.model, model_build(runtime))))
    inside = {f"layers.{i}.{name}" for i in range(2) for name in LINEAR}
    assert {name for name, reason in table.items() if reason is None} == inside
    assert "lm_head.dense" in table


def test_a_model_without_a_layer_in_fp8_is_refused() -> None:
    build = replace(built(), fp8=None)  # as a list of a user's own that passes nothing on
    with pytest.raises(ConfigError, match="no layer of the model is in FP8") as caught:
        decisions(gpt_task().layers(tiny_run("nowhere", **FP8).model, build))
    assert "layers.1.mlp.fc2" in caught.value.found


def test_the_table_is_short_for_many_layers() -> None:
    table = [Decision("embedding", "it is a table")]
    table += [Decision(f"layers.{i}.fc", None if 0 < i < 4 else "an end") for i in (0, 1, 2, 3, 5)]
    assert summary(table) == [
        "embedding: not in FP8, it is a table",
        "layers.0,5.fc: not in FP8, an end",
        "layers.1-3.fc: FP8",
    ]


@pytest.mark.parametrize("recipe", Fp8Recipe)
@pytest.mark.parametrize("form", Fp8Format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_probe_sees_the_rounding_of_fp8(
    recipe: Fp8Recipe, form: Fp8Format, dtype: torch.dtype
) -> None:
    for margin in (0, 0 if recipe is Fp8Recipe.MXFP8 else 8):
        config = Fp8Config(fp8_format=form, fp8_recipe=recipe, fp8_margin=margin)
        error, expected = probe(config, dtype)
        assert expected / 1.2 < error < expected * 1.2


def not_quantised(matrix: Tensor, dtype: torch.dtype, blocks: Any, **named: Any) -> Quantized:
    return Quantized(matrix, torch.ones(1, 1), blocks)


def in_bfloat16(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return a.codes.to(dtype) @ b.codes.to(dtype).t()


def without_scales(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    return (a.codes.to(dtype) @ b.codes.to(dtype).t()) * 1e-4


def rounded_twice(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    wide = (dequantize(one, torch.float32).to(torch.float8_e5m2).float() for one in (a, b))
    one, other = wide
    return (one @ other.t()).to(torch.float8_e5m2).to(dtype)


@pytest.mark.parametrize("broken", [in_bfloat16, without_scales, rounded_twice])
def test_products_that_are_not_in_fp8_are_refused(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is in_bfloat16:
        monkeypatch.setattr(products, "quantize", not_quantised)
    monkeypatch.setattr(products, "scaled_matmul", broken)
    with pytest.raises(MachineError, match="not rounded as in FP8"):
        probe(Fp8Config(fp8_format=Fp8Format.E4M3), torch.bfloat16)


def test_a_run_says_what_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(tiny_run("nowhere", **FP8, bf16=True))
    lines = list[str]()
    monkeypatch.setattr(log, "info", lines.append)
    build = model_build(runtime)
    build_engine(runtime.config, gpt_task(), build, runtime.tokenizer, runtime.timers)
    (text,) = [line for line in lines if "FP8" in line]
    assert "FP8: hybrid, scales tensorwise, products emulated" in text
    assert "layers.0-1.mlp.fc2: FP8" in text
    assert "embedding.word: not in FP8" in text


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fp8_wgrad": False},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"num_layers": 3, "first_last_layers_bf16": True},
        {**ROUTED, "recompute_granularity": "full"},
        {**ROUTED, "fp8_recipe": "delayed"},
    ],
)
def test_a_first_step_whose_products_ran_passes(flags: dict[str, Any]) -> None:
    engine = tiny_engine(**FP8, **flags)
    engine.evaluate(iter(tiny_batches(3)), 3)  # which counts outputs, and is no step
    step(engine)
    step(engine)


@pytest.mark.parametrize("name", ["_weight_gradient", "input_gradient", "output"])
def test_a_first_step_without_a_product_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(**FP8)
    real = getattr(Fp8Products, name)

    def uncounted(self: Fp8Products, *args: Any) -> Any:
        before = vars(self).copy()
        result = real(self, *args)
        vars(self).update(before)  # as if another function had computed it
        return result

    monkeypatch.setattr(Fp8Products, name, uncounted)
    with pytest.raises(MachineError, match="did not all run") as caught:
        step(engine)
    assert "layers.0.attention.qkv" in caught.value.found
    assert "in a step of 2 micro-batches" in caught.value.found


def test_outputs_run_twice_only_where_activations_are_recomputed() -> None:
    stage = tiny_engine(**FP8).stage
    for recomputes in (True, False):
        first = FirstStep(stage, recomputes=recomputes)
        for layer in fp8.products_of(dict(stage.named_modules())).values():
            outputs, inputs, weights = layer.counts
            layer._outputs, layer._input_gradients = outputs + 2, inputs + 1
            layer._weight_gradients = weights + 1
        if recomputes:
            first.check(1)
        else:
            with pytest.raises(MachineError, match="did not all run"):
                first.check(1)


def test_layers_are_in_fp8_from_their_making_and_the_optimizer_updates_them() -> None:
    """No layer is converted or replaced later, so that there is no order to get wrong."""
    engine = tiny_engine(**FP8)
    before = dict(engine.stage.named_parameters())
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    assert engine.optimizer.named_state().keys() == before.keys()
    step(engine)
    for name, parameter in engine.stage.named_parameters():
        assert parameter is before[name]
        assert not torch.equal(parameter, values[name]), name
