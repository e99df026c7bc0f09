"""Linear layers in FP8: every product is that of the rounded operands, late or again to the bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import FP8_BLOCKS, ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from megatron.mpu.weight_gradients import WeightGradients
from megatron.ops.fp8_products import Fp8Products
from megatron.ops.quantize import Blocks, dequantize, quantize

SINGLE = ParallelContext.single()
TOKENS, WIDTH, OUT = 80, 128, 256
Linear = ColumnParallelLinear | RowParallelLinear


def config(**changes: Any) -> Fp8Config:
    return Fp8Config(**{"fp8_format": Fp8Format.HYBRID} | changes)


def linear(
    fp8: Fp8Config | None, kind: type[Linear] = ColumnParallelLinear, dtype: Any = torch.float64
) -> Linear:
    layer = kind(WIDTH, OUT, ctx=SINGLE, init=Init("zeros"), dtype=dtype).in_fp8(fp8)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return layer


def inputs(dtype: Any = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    hidden, grad = (torch.randn(TOKENS // 2, 2, n, generator=draw) for n in (WIDTH, OUT))
    return hidden.to(dtype).requires_grad_(), (1e-4 * grad).to(dtype)


def rounded(matrix: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """A matrix in float64 as its codes and scales stand for it, along its last dimension."""
    missing = -matrix.shape[1] % (blocks.value[1] or 1)
    padded = F.pad(matrix, (0, missing))
    return dequantize(quantize(padded, dtype, blocks), torch.float64)[:, : matrix.shape[1]]


@pytest.mark.parametrize("recipe", Fp8Recipe)
@pytest.mark.parametrize("form", Fp8Format)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_every_product_is_that_of_the_rounded_operands(
    recipe: Fp8Recipe, form: Fp8Format, kind: type[Linear]
) -> None:
    layer = linear(config(fp8_format=form, fp8_recipe=recipe), kind)
    hidden, grad = inputs()
    output = layer(hidden)
    output.backward(grad)
    narrow = torch.float8_e4m3fn
    wide = torch.float8_e5m2 if form is Fp8Format.HYBRID else narrow
    of_rows, of_weight = FP8_BLOCKS[recipe]
    x, g = hidden.detach().reshape(TOKENS, WIDTH), grad.reshape(TOKENS, OUT)
    assert layer.bias is not None
    with torch.no_grad():
        w, bias = layer.weight, layer.bias
        expected = rounded(x, of_rows, narrow) @ rounded(w, of_weight, narrow).t() + bias
        of_input = rounded(g, of_rows, wide) @ rounded(w.t(), of_weight, narrow).t()
        of_weights = rounded(g.t(), of_rows, wide) @ rounded(x.t(), of_rows, narrow).t()
    found = (output.detach().reshape(TOKENS, OUT), hidden.grad.reshape(TOKENS, WIDTH))
    close = {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(found[1], of_input, **close)
    torch.testing.assert_close(layer.weight.grad, of_weights, **close)
    torch.testing.assert_close(layer.bias.grad, g.sum(0), **close)
    assert layer.fp8 is not None
    assert layer.fp8.counts == (1, 1, 1)


def test_gradients_of_weights_can_stay_in_the_precision_of_the_model() -> None:
    layer = linear(config(fp8_wgrad=False))
    hidden, grad = inputs()
    layer(hidden).backward(grad)
    exact = grad.reshape(TOKENS, OUT).t() @ hidden.detach().reshape(TOKENS, WIDTH)
    torch.testing.assert_close(layer.weight.grad, exact, rtol=1e-12, atol=1e-15)
    assert layer.fp8 is not None
    assert layer.fp8.counts == (1, 1, 0)


def test_a_margin_reaches_the_scales() -> None:
    hidden = torch.full((32, WIDTH), 2.0**-14, dtype=torch.float64)
    hidden[0, 0] = 1.0
    for margin, is_lost in ((0, False), (8, True)):  # below the smallest code of e4m3
        layer = linear(config(fp8_margin=margin))
        assert torch.equal(layer(hidden)[1], layer.bias) == is_lost


def test_what_is_not_finite_reaches_every_gradient() -> None:
    layer = linear(config())
    hidden, grad = inputs()
    grad[3, 1, 5] = torch.inf
    layer(hidden).backward(grad)
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isnan().all()


@pytest.mark.parametrize("recipe", Fp8Recipe)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_late_gradients_and_recomputed_outputs_have_the_same_bits(
    recipe: Fp8Recipe, again: bool, late: bool
) -> None:
    plain, other = (linear(config(fp8_recipe=recipe), dtype=torch.bfloat16) for _ in range(2))
    hidden, grad = inputs(torch.bfloat16)
    plain(hidden).backward(grad)
    copy, queue = hidden.detach().clone().requires_grad_(), WeightGradients()
    if late:
        queue.adopt([other.weight])
    output = recompute(other, RandomStreams(1), copy) if again else other(copy)
    with queue.collecting("key"):
        output.backward(grad)
    assert (other.weight.grad is None) == late
    queue.compute("key")
    for one, two in zip((hidden, *plain.parameters()), (copy, *other.parameters())):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    assert isinstance(other.fp8, Fp8Products)
    assert other.fp8.counts == (1 + again, 1, 1)


def test_without_gradients_nothing_is_kept() -> None:
    layer = linear(config())
    with torch.no_grad():
        output = layer(inputs()[0])
    assert not output.requires_grad
    assert layer.fp8 is not None
    assert layer.fp8.counts == (1, 0, 0)
