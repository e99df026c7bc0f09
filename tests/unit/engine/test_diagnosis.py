"""Where a number that is not finite is found, and what computing twice changes: nothing."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.engine.base import StepPlan
from megatron.engine.module_trace import TensorKind
from megatron.engine.native import NativeEngine
from megatron.errors import MachineError
from tests.unit.engine.engines import tiny_batches, tiny_engine

PLAN = StepPlan(
    num_microbatches=3,
    global_batch_size=3,
    learning_rate=0.01,
    weight_decay=0.1,
    seq_length=16,
    first_sample=0,
)
BATCHES = tiny_batches(3)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"hidden_dropout": 0.2},
    "experts": {
        "num_experts": 4,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "z_loss_coeff": 0.001,
    },
    "fp8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "recomputed": {"hidden_dropout": 0.2, "recompute_granularity": "full"},
}


def on_output(
    engine: NativeEngine, name: str, change: Callable[[Tensor], Tensor], *, from_call: int = 0
) -> None:
    """Change what a module returns, from so many of its calls on."""
    calls = 0

    def changed(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return change(output) if calls > from_call else output

    engine.stage.get_submodule(name).register_forward_hook(changed)


class Infinite(torch.autograd.Function):
    """Hands on its input, and an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], math.inf)


def infinite_gradient(hidden: Tensor) -> Tensor:
    result: Tensor = Infinite.apply(hidden)  # type: ignore[no-untyped-call]
    return result


def one_nan(hidden: Tensor) -> Tensor:
    changed = torch.zeros_like(hidden)
    changed.view(-1)[0] = math.nan
    return hidden + changed


def test_a_step_of_finite_numbers_has_no_finding() -> None:
    assert tiny_engine().diagnosis().find_nonfinite(BATCHES, PLAN) is None


def test_a_parameter_is_named_with_its_numbers() -> None:
    engine = tiny_engine()
    with torch.no_grad():
        engine.stage.get_parameter("layers.1.input_norm.weight")[3] = math.inf
    assert engine.diagnosis().find_nonfinite(BATCHES, PLAN) == (
        "rank 0, layers.1.input_norm.weight, parameter: 1 of 16 numbers are not finite, the others "
        "are from 1 to 1"
    )


@pytest.mark.parametrize("recompute", [None, "full"])
def test_an_output_is_named_with_the_innermost_module_and_its_micro_batch(
    recompute: str | None,
) -> None:
    engine = tiny_engine(recompute_granularity=recompute)
    # Layers that are recomputed run twice for each micro-batch.
    on_output(engine, "layers.1.mlp.fc1", one_nan, from_call=2 if recompute else 1)
    found = engine.diagnosis().find_nonfinite(BATCHES, PLAN)
    assert found is not None
    assert found.startswith("rank 0, micro-batch 1, layers.1.mlp.fc1, output (forward): 1 of ")


def test_a_gradient_is_named_where_the_backward_pass_first_has_it() -> None:
    engine = tiny_engine()
    on_output(engine, "layers.0.mlp.fc2", infinite_gradient)
    found = engine.diagnosis().find_nonfinite(BATCHES, PLAN)
    assert found is not None
    assert "micro-batch 0, layers.0.mlp.fc1, gradient of the output (backward): " in found
    assert found.endswith("numbers are not finite")


def test_a_gradient_of_a_later_layer_comes_before_one_of_an_earlier() -> None:
    diagnosis = tiny_engine().diagnosis()
    kind = TensorKind.OUTPUT_GRADIENT
    first = diagnosis._finding("layers.1.mlp", kind, 9, "")
    assert first < diagnosis._finding("layers.0.mlp", kind, 3, "")
    later = diagnosis._finding("layers.1.mlp", TensorKind.OUTPUT, 1, "")
    assert diagnosis._finding("embedding.word", TensorKind.OUTPUT, 2, "") < later < first


def test_a_micro_batch_is_computed_again_with_its_own_samples() -> None:
    """Outputs after dropout are those of the step itself, one micro-batch after the other."""
    engine = tiny_engine(hidden_dropout=0.5)
    outputs: list[Tensor] = []
    layer = engine.stage.get_submodule("layers.1")
    layer.register_forward_hook(lambda *call: outputs.append(call[2][0].detach().clone()))
    engine.start_step(iter(BATCHES), dataclasses.replace(PLAN, learning_rate=0.0))
    assert engine.diagnosis().find_nonfinite(BATCHES, PLAN) is None
    assert len(outputs) == 6
    for expected, found in zip(outputs[:3], outputs[3:]):
        assert torch.equal(expected, found)


def test_a_loss_is_found_where_all_layers_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    run = engine._executor.train

    def broken(*args: Any, **flags: Any) -> list[Tensor]:
        return [loss * math.inf for loss in run(*args, **flags)]

    monkeypatch.setattr(engine._executor, "train", broken)
    found = engine.diagnosis().find_nonfinite(BATCHES, PLAN)
    assert found is not None
    assert "the model, loss: 2 of 2 numbers" in found


@pytest.mark.parametrize("model", MODELS)
def test_computing_again_changes_nothing_of_the_run(model: str) -> None:
    """Two engines do the same steps, one of them with passes between."""
    plain, checked = tiny_engine(**MODELS[model]), tiny_engine(**MODELS[model])
    for _ in range(2):
        expected = plain.train_step(iter(BATCHES), PLAN)
        found = checked.train_step(iter(BATCHES), PLAN)
        assert found == expected
        checked.diagnosis().check_repeats(BATCHES, PLAN)
        assert checked.diagnosis().find_nonfinite(BATCHES, PLAN) is None
    for (name, one), other in zip(plain.stage.named_parameters(), checked.stage.parameters()):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("module", "kind"),
    [("layers.0.attention.qkv", "output (forward)"), ("final_norm", "")],
)
def test_one_bit_that_differs_the_second_time_is_found(module: str, kind: str) -> None:
    engine = tiny_engine()

    def flipped(output: Tensor) -> Tensor:
        bits = output.detach().clone().view(torch.int64)
        bits.view(-1)[5] ^= 1
        return output + (bits.view(output.dtype) - output.detach())

    if not kind:  # nobody sees the output of a layer that is called by another name
        weight = engine.stage.get_parameter("final_norm.weight")
        seen = 0

        def changed(gradient: Tensor) -> Tensor:
            nonlocal seen
            seen += 1
            return flipped(gradient) if seen > 1 else gradient

        weight.register_hook(changed)  # type: ignore[no-untyped-call]
        module, kind = "final_norm.weight", "gradient of the parameter (backward)"
    else:
        on_output(engine, module, flipped, from_call=1)
    with pytest.raises(MachineError, match="other numbers the second time") as caught:
        engine.diagnosis().check_repeats(BATCHES, PLAN)
    assert caught.value.found == f"first on rank 0: {module}, {kind}"
    assert caught.value.retryable
