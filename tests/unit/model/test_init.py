"""Initial values follow from the seed and the name, and from nothing else."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from megatron.config.precision import PrecisionConfig
from megatron.errors import MegatronError
from megatron.model.gpt_model import GPTModel, GPTModelPipe
from megatron.model.init import draw, initialize_parameters, residual_init, weight_init
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Init
from megatron.mpu.stage_plan import LayerRange
from tests.support.models import tiny_build, tiny_config

CTX = ParallelContext.single()


def values(seed: int = 1, **changes: object) -> dict[str, torch.Tensor]:
    build = dataclasses.replace(tiny_build(), **changes)  # type: ignore[arg-type]
    model = GPTModel(tiny_config(), build)
    initialize_parameters(model, seed=seed, ctx=CTX)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_seed_gives_the_same_values_whatever_the_default_generators_hold() -> None:
    first = values()
    torch.manual_seed(99)
    second = values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = values(seed=2)
    assert not torch.equal(first["layers.0.mlp.fc1.weight"], other["layers.0.mlp.fc1.weight"])


def test_initialising_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    values()
    assert torch.equal(torch.get_rng_state(), before)


def test_no_two_matrices_start_alike() -> None:
    weights = [v for v in values().values() if v.shape == (16, 64)]
    assert len(weights) == 2
    assert not torch.equal(*weights)


def test_a_stage_starts_with_the_values_of_the_whole() -> None:
    whole = values()
    pipe = GPTModelPipe(tiny_config(), tiny_build())
    for start, stop in ((0, 2), (2, 5)):
        stage = pipe.stage(LayerRange(start, stop))
        initialize_parameters(stage, seed=1, ctx=CTX)
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_lower_precision_starts_with_the_same_values_rounded() -> None:
    whole = values()
    half = values(precision=PrecisionConfig(bf16=True))
    for name, value in half.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, whole[name].bfloat16()), name


def test_padding_rows_are_zero_and_do_not_move_the_others() -> None:
    small = values(vocab=VocabSize(50, 50))["embedding.word.weight"]
    large = values(vocab=VocabSize(50, 96))["embedding.word.weight"]
    assert torch.equal(small, large[:50])
    assert not large[50:].any()


def test_spreads_are_those_of_the_config() -> None:
    config = tiny_config(num_layers=8, init_method_std=0.02)
    normal = draw(weight_init(config), (400, 500), seed=1, name="a")
    scaled = draw(residual_init(config), (400, 500), seed=1, name="b")
    # 200,000 draws: the standard deviation is known to 1 / sqrt(400,000), 0.2 percent.
    assert normal.std().item() == pytest.approx(0.02, rel=0.01)
    assert scaled.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.01)
    assert abs(normal.mean().item()) < 0.0005


def test_residual_outputs_may_have_a_spread_of_their_own() -> None:
    config = tiny_config(num_layers=8, init_method_std=0.02, output_layer_init_method_std=0.07)
    assert weight_init(config) == Init("normal", std=0.02)
    assert residual_init(config) == Init("normal", std=0.07)


def test_xavier_bounds_come_from_the_whole_shape_without_padding() -> None:
    config = tiny_config(init_method_xavier_uniform=True)
    assert weight_init(config) == residual_init(config) == Init("xavier_uniform")
    bound = math.sqrt(6 / (300 + 100))
    drawn = draw(Init("xavier_uniform", true_rows=300), (320, 100), seed=1, name="a")
    assert bound * 0.99 < drawn.abs().max().item() <= bound
    assert not drawn[300:].any()


def test_of_a_stack_each_matrix_has_xavier_bounds_of_its_own() -> None:
    bound = math.sqrt(6 / (300 + 100))
    drawn = draw(Init("xavier_uniform"), (4, 300, 100), seed=1, name="a")
    assert bound * 0.99 < drawn.abs().max().item() <= bound


def test_biases_are_zero_and_gains_one() -> None:
    whole = values()
    assert not whole["layers.0.attention.qkv.bias"].any()
    assert (whole["final_norm.weight"] == 1).all()
    assert not whole["final_norm.bias"].any()


def test_a_parameter_without_a_rule_is_an_error_that_names_it() -> None:
    model = nn.Module()
    model.add_module("stray", nn.Linear(2, 2))
    with pytest.raises(MegatronError, match="has no rule for its initial values") as raised:
        initialize_parameters(model, seed=1, ctx=CTX)
    assert "stray.weight" in str(raised.value)


def test_nothing_is_drawn_for_a_tensor_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a whole tensor was drawn")

    monkeypatch.setattr("megatron.model.init.draw", drawn)
    with torch.device("meta"):
        model = GPTModel(tiny_config(), tiny_build())
    initialize_parameters(model, seed=1, ctx=CTX)
    with pytest.raises(AssertionError, match="drawn"):
        values()
