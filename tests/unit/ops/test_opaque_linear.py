"""The operator of a linear layer computes what the layer does, and adds to the weight's buffer."""

import pytest
import torch
from torch import Tensor

from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Init, InitKind
from megatron.mpu.weight_gradients import GradientSum
from megatron.ops.opaque_linear import numbered, opaque_linear

KINDS = (ColumnParallelLinear, RowParallelLinear)
Layer = ColumnParallelLinear | RowParallelLinear


def layer_of(kind: type[Layer], width: int = 4, out: int = 3) -> tuple[Layer, Tensor]:
    ctx = ParallelContext.single()
    made = kind(width, out, ctx=ctx, init=Init(InitKind.ZEROS), dtype=torch.float64)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    total = torch.empty_like(made.weight)
    GradientSum(total).accept_products(made.weight, arrived=lambda: None)
    return made, total


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_all_gradients_are_those_of_the_layer(kind: type[Layer]) -> None:
    made, total = layer_of(kind)
    assert made.bias is not None
    hidden = torch.randn(5, 2, 4, dtype=torch.float64)
    plain = [t.detach().clone().requires_grad_() for t in (hidden, made.weight, made.bias)]
    expected = torch.nn.functional.linear(*plain)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    hidden.requires_grad_()
    out = opaque_linear(hidden, made.weight, made.bias, numbered(made))
    out.backward(grad)
    torch.testing.assert_close(out, expected)
    for found, tensor in zip((hidden.grad, total, made.bias.grad), plain):
        torch.testing.assert_close(found, tensor.grad)
    assert made.weight.grad is None


@pytest.mark.parametrize("recipe", [Fp8Recipe.TENSORWISE, Fp8Recipe.ROWWISE])
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_fp8_are_those_of_the_layer(kind: type[Layer], recipe: Fp8Recipe) -> None:
    config = Fp8Config(fp8_format=Fp8Format.E4M3, fp8_recipe=recipe)
    made, total = layer_of(kind, 32, 16)
    made.in_fp8(config)
    assert made.fp8 is not None
    keeps = made.fp8.keeps
    assert keeps == (4 if recipe is Fp8Recipe.TENSORWISE else 0)
    hidden = torch.randn(8, 2, 32, dtype=torch.float64, requires_grad=True)
    expected = made(hidden)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    sums, hidden_grad = total.clone(), hidden.grad
    assert hidden_grad is not None
    hidden.grad = None
    out = opaque_linear(hidden, made.weight, made.bias, numbered(made), keeps=keeps)
    out.backward(grad)
    assert made.fp8.counts == (2, 2, 2)
    assert torch.equal(out, expected)
    assert torch.equal(hidden.grad, hidden_grad)
    torch.testing.assert_close(total, 2 * sums, rtol=0, atol=0)


def test_the_sequence_may_become_longer_or_shorter() -> None:
    made, _ = layer_of(ColumnParallelLinear)
    with torch.device("meta"):
        hidden, weight = torch.empty(6, 2, 4), torch.empty(3, 4)
    number = numbered(made)
    assert opaque_linear(hidden, weight, None, number, gathers=2).shape == (12, 2, 3)
    assert opaque_linear(hidden, weight, None, number, scatters=2).shape == (3, 2, 3)


def test_an_input_without_a_gradient_is_refused() -> None:
    made, _ = layer_of(ColumnParallelLinear)
    out = opaque_linear(torch.ones(2, 1, 4, dtype=torch.float64), made.weight, None, numbered(made))
    with pytest.raises(AssertionError):
        out.sum().backward()


def test_a_number_keeps_no_layer_alive() -> None:
    made, _ = layer_of(ColumnParallelLinear)
    number, weight = numbered(made), made.weight
    del made
    with pytest.raises(KeyError):
        opaque_linear(torch.ones(2, 1, 4, dtype=torch.float64), weight, None, number)
