"""The MLP's order of halves and its activations."""

import dataclasses

import pytest
import torch

from megatron.config.activations import ActivationPolicy, RecomputeModule
from megatron.config.model import Activation, GluActivation
from megatron.model.experts.mixture import MixtureOfExperts
from megatron.model.mlp import ACTIVATIONS, MLP, unit_of
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import partition_of
from tests.support.models import roughen, tiny_build, tiny_config
from tests.support.operators import Operators


def test_every_activation_of_the_config_is_there() -> None:
    assert set(ACTIVATIONS) == set(Activation)


def test_the_gate_is_the_first_half() -> None:
    mlp = MLP(tiny_config(glu_activation=GluActivation.REGLU, ffn_hidden_size=8), tiny_build())
    roughen(mlp, ParallelContext.single())
    with torch.no_grad():
        mlp.fc1.weight[:8] = 0  # gate = -1 everywhere, which ReLU closes
        mlp.fc1.bias[:8] = -1
    hidden = torch.randn(3, 2, 16, dtype=torch.float64)
    assert torch.equal(mlp(hidden), mlp.fc2.bias.expand(3, 2, 16))


@pytest.mark.parametrize("glu", [None, GluActivation.SWIGLU])
def test_a_gated_matrix_is_split_as_two_blocks(glu: GluActivation | None) -> None:
    mlp = MLP(tiny_config(glu_activation=glu), tiny_build())
    partition = partition_of(mlp.fc1.weight)
    assert partition is not None
    assert partition.blocks == (1 if glu is None else 2)
    assert mlp.fc1.weight.shape[0] == 64 * partition.blocks


@pytest.mark.parametrize("glu", GluActivation)
def test_a_gated_unit_by_the_operations_of_pytorch_is_the_same(glu: GluActivation) -> None:
    config, middle = tiny_config(glu_activation=glu), torch.randn(5, 12, dtype=torch.float64)
    results, operators = [], []
    for fused in (True, False):
        x = middle.clone().requires_grad_()
        with Operators() as called:
            out = unit_of(config, fused=fused)(x)
        results += [out, *torch.autograd.grad(out.sin().sum(), x)]
        operators.append("megatron::activate" in called.names)
    without = (Activation.GELU_ERF, Activation.GELU_SIGMOID)
    assert operators == [config.activation not in without, False]
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-13, atol=1e-13)


def test_a_gated_unit_with_an_offset_or_a_bound_is_never_one_operator() -> None:
    gate, up = torch.randn(2, 5, 6, dtype=torch.float64)
    middle = torch.cat([gate, up], -1)
    quick = {"glu_activation": GluActivation.QUICK_GEGLU}
    for offset, bound in ((1.0, None), (0.0, 0.5), (1.0, 0.5)):
        given = {"glu_linear_offset": offset, "activation_func_clamp_value": bound}
        config = tiny_config(**quick, **given)
        limit = float("inf") if bound is None else bound
        low = gate.clamp(max=limit)
        expected = low * torch.sigmoid(1.702 * low) * (up.clamp(-limit, limit) + offset)
        torch.testing.assert_close(unit_of(config, fused=True)(middle), expected)
        swiglu = tiny_config(swiglu=True, **given)
        with Operators() as called:
            unit_of(swiglu, fused=True)(middle)
        assert "megatron::activate" not in called.names


def test_layers_take_the_operations_that_they_are_built_with() -> None:
    config = tiny_config(glu_activation=GluActivation.SWIGLU)
    experts = tiny_config(glu_activation=GluActivation.SWIGLU, num_experts=2, add_bias_linear=False)
    for fused in (True, False):
        build = tiny_build(fuse_gated_units=fused)
        for layer in (MLP(config, build), MixtureOfExperts(experts, build)):
            roughen(layer, ParallelContext.single())
            with Operators() as called:
                layer(torch.randn(3, 2, 16, dtype=torch.float64))
            assert ("megatron::activate" in called.names) == fused


@pytest.mark.parametrize("glu", [None, GluActivation.SWIGLU])
@pytest.mark.parametrize("forgets", [False, True])
def test_an_activation_is_recomputed_once_in_training(
    glu: GluActivation | None, forgets: bool
) -> None:
    modules = frozenset({RecomputeModule.ACTIVATION} if forgets else ())
    build = dataclasses.replace(tiny_build(), activations=ActivationPolicy(modules=modules))
    mlp = MLP(tiny_config(glu_activation=glu), build)
    made: list[torch.Size] = []
    activate = mlp._activate

    def noted(middle: torch.Tensor) -> torch.Tensor:
        made.append(middle.shape)
        return activate(middle)

    mlp._activate = noted
    mlp.train()
    hidden = torch.randn(3, 2, 16, dtype=torch.float64, requires_grad=True)
    output = mlp(hidden)
    assert len(made) == 1
    output.sum().backward()
    assert len(made) == (2 if forgets else 1)
    mlp.eval()
    mlp(hidden).sum().backward()
    assert len(made) == (3 if forgets else 2)
