"""Histories of largest values on one rank; over several they are in tests/laws/layouts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.fp8 import AmaxAlgorithm, Fp8Config, Fp8Format, Fp8Recipe
from megatron.engine.amax_history import AmaxHistories
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from megatron.ops.fp8_products import Fp8Products
from megatron.ops.quantize import Blocks, dequantize, quantize

SINGLE = ParallelContext.single()
WIDTH, OUT = 32, 48
APPLIED, VOID = torch.tensor(True), torch.tensor(False)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def config(**changes: Any) -> Fp8Config:
    flags = {"fp8_format": Fp8Format.HYBRID, "fp8_recipe": Fp8Recipe.DELAYED}
    return Fp8Config(**flags | changes)


def layer_with_histories(**changes: Any) -> tuple[ColumnParallelLinear, AmaxHistories]:
    layer = ColumnParallelLinear(
        WIDTH, OUT, ctx=SINGLE, init=Init("zeros"), bias=False, dtype=torch.float64
    ).in_fp8(config(**changes))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(1)))
    assert layer.fp8 is not None
    # The first name is of a layer on another rank.
    names, products = ["elsewhere", "here"], {"here": layer.fp8}
    return layer, AmaxHistories(names, products, config(**changes), SINGLE.world)


def a_micro_batch(layer: ColumnParallelLinear, of_input: float, of_grad: float) -> Tensor:
    """Forward and backward with such largest values; return the output."""
    draw = torch.Generator().manual_seed(2)
    hidden, grad = (torch.rand(16, n, generator=draw, dtype=torch.float64) for n in (WIDTH, OUT))
    hidden[3, 4], grad[5, 6] = of_input, of_grad
    output: Tensor = layer(hidden.requires_grad_())
    output.backward(grad)
    return output.detach()


def newest(histories: AmaxHistories, count: int) -> list[list[float]]:
    return histories.by_layer()["here"][:, :count].tolist()


def test_micro_batches_of_a_step_are_one_entry() -> None:
    layer, histories = layer_with_histories()
    weight = float(layer.weight.detach().abs().max().float())
    for of_input, of_grad in ((8.0, 2.0), (4.0, 16.0)):
        a_micro_batch(layer, of_input, of_grad)
    histories.advance(APPLIED)
    a_micro_batch(layer, 3.0, 5.0)
    histories.advance(APPLIED)
    assert newest(histories, 3) == [[3.0, 8.0, 0.0], [weight, weight, 0.0], [5.0, 16.0, 0.0]]
    assert not histories.by_layer()["elsewhere"].any()


@pytest.mark.parametrize(
    ("algorithm", "length", "expected"),
    [
        (AmaxAlgorithm.MAX, 3, [8.0, 8.0, 8.0, 6.0]),
        (AmaxAlgorithm.MAX, 2, [8.0, 8.0, 6.0, 6.0]),
        (AmaxAlgorithm.MOST_RECENT, 3, [8.0, 4.0, 6.0, 2.0]),
        (AmaxAlgorithm.MAX, 1, [8.0, 4.0, 6.0, 2.0]),
    ],
)
def test_scales_come_from_the_steps_in_the_history(
    algorithm: AmaxAlgorithm, length: int, expected: list[float]
) -> None:
    layer, histories = layer_with_histories(
        fp8_amax_history_len=length, fp8_amax_compute_algo=algorithm
    )
    for of_input, amax in zip((8.0, 4.0, 6.0, 2.0), expected):
        a_micro_batch(layer, of_input, 1.0)
        histories.advance(APPLIED)
        assert layer.fp8 is not None
        assert layer.fp8.history is not None
        assert layer.fp8.history.before is not None
        assert float(layer.fp8.history.before[0]) == amax


def test_the_first_step_is_tensorwise_to_the_bit_and_later_ones_have_the_scales_before() -> None:
    layer, histories = layer_with_histories(fp8_margin=1)
    other, _ = layer_with_histories(fp8_margin=1)
    other.fp8 = None
    current = other.in_fp8(config(fp8_recipe=Fp8Recipe.TENSORWISE, fp8_margin=1))
    assert torch.equal(a_micro_batch(layer, 8.0, 2.0), a_micro_batch(current, 8.0, 2.0))
    assert torch.equal(layer.weight.grad, current.weight.grad)
    histories.advance(APPLIED)
    layer.weight.grad = None
    draw = torch.Generator().manual_seed(3)
    hidden, grad = (torch.rand(16, n, generator=draw, dtype=torch.float64) for n in (WIDTH, OUT))
    hidden[0, 0], grad[1, 1] = 100.0, 1000.0  # beyond what the scales hold, which is 2 x before
    output = layer(hidden.requires_grad_())
    output.backward(grad)
    with torch.no_grad():
        w = layer.weight
        x, w_, g = (
            dequantize(
                quantize(matrix, dtype, Blocks.TENSOR, amax=torch.tensor([[amax]]), margin=1),
                torch.float64,
            )
            for matrix, dtype, amax in (
                (hidden, E4M3, 8.0),
                (w, E4M3, float(w.abs().max().float())),
                (grad, E5M2, 2.0),
            )
        )
    assert (float(x.max()), float(g.max())) == pytest.approx((16.0, 4.0)), "they saturate"
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(output.detach(), x @ w_.t(), **close)
    torch.testing.assert_close(hidden.grad, g @ w_, **close)
    torch.testing.assert_close(layer.weight.grad, g.t() @ x, **close)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("in_gradient", [False, True])
def test_what_is_not_finite_is_not_clamped_away(value: float, in_gradient: bool) -> None:
    layer, histories = layer_with_histories()
    a_micro_batch(layer, 8.0, 2.0)
    histories.advance(APPLIED)
    layer.weight.grad = None
    output = a_micro_batch(layer, 8.0 if in_gradient else value, value if in_gradient else 2.0)
    assert output.isnan().any() != in_gradient
    assert layer.weight.grad is not None
    assert layer.weight.grad.isnan().any()


def test_a_void_step_leaves_the_histories_and_its_values_are_forgotten() -> None:
    layer, histories = layer_with_histories()
    a_micro_batch(layer, 8.0, 2.0)
    histories.advance(APPLIED)
    before = histories.by_layer()["here"].clone()
    a_micro_batch(layer, torch.inf, 64.0)
    histories.advance(VOID)
    assert torch.equal(histories.by_layer()["here"], before)
    a_micro_batch(layer, 3.0, 4.0)
    histories.advance(APPLIED)
    assert [values[:2] for values in newest(histories, 2)][::2] == [[3.0, 8.0], [4.0, 2.0]]


def test_evaluations_record_nothing_and_recomputation_nothing_more() -> None:
    layer, histories = layer_with_histories()
    with torch.no_grad():
        layer(torch.full((16, WIDTH), 100.0, dtype=torch.float64))
    layer.eval()
    layer(torch.full((16, WIDTH), 100.0, dtype=torch.float64))
    layer.train()
    hidden = torch.full((16, WIDTH), 8.0, dtype=torch.float64, requires_grad=True)
    assert isinstance(layer.fp8, Fp8Products)
    assert layer.fp8.history is not None
    recorded = list[int]()
    real = layer.fp8.history.record
    layer.fp8.history.record = lambda amax: (recorded.append(len(amax)), real(amax))[1]  # type: ignore[method-assign]
    recompute(layer, RandomStreams(1), hidden).sum().backward()
    assert layer.fp8.counts == (4, 1, 1)
    assert recorded == [3]
    histories.advance(APPLIED)
    assert [values[0] for values in newest(histories, 1)][::2] == [8.0, 1.0]


def test_restored_histories_give_the_scales_that_they_gave() -> None:
    layer, histories = layer_with_histories(fp8_amax_history_len=2)
    for of_input in (8.0, 4.0):
        a_micro_batch(layer, of_input, 1.0)
        histories.advance(APPLIED)
    other, restored = layer_with_histories(fp8_amax_history_len=2)
    for name, values in restored.by_layer().items():
        values.copy_(histories.by_layer()[name])
    restored.restored(histories.scalars())
    assert restored.scalars() == histories.scalars() == {"steps": 2}
    assert torch.equal(a_micro_batch(layer, 5.0, 3.0), a_micro_batch(other, 5.0, 3.0))
    fresh, empty = layer_with_histories(fp8_amax_history_len=2)
    empty.restored({})
    assert fresh.fp8 is not None
    assert fresh.fp8.history is not None
    assert fresh.fp8.history.before is None
