"""Gradients of weights that wait: the same bits, once per key, through the same hooks."""

import pytest
import torch
from torch import Tensor

from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from megatron.mpu.weight_gradients import WeightGradients, defer_or_compute, is_deferrable
from megatron.optimizer.grad_buffer import GradBuffer

SINGLE = ParallelContext.single()


class Pair(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(
            5, 7, ctx=SINGLE, init=Init("ones"), dtype=dtype, bias=bias
        )
        self.second = RowParallelLinear(7, 5, ctx=SINGLE, init=Init("ones"), dtype=dtype, bias=bias)
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(hidden)))
        return out


def batches(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randn(6, 2, 5, generator=draw).to(dtype) for _ in range(3)]


def at_once(dtype: torch.dtype, bias: bool) -> list[Tensor]:
    pair = Pair(dtype, bias)
    buffer = GradBuffer(pair.named_parameters(), SINGLE.dp, gradient_dtype=torch.float32)
    for hidden in batches(dtype):
        pair(hidden).sum().backward()
    del buffer
    return [parameter.main_grad for parameter in pair.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("again", [False, True])
def test_late_gradients_have_the_same_bits(dtype: torch.dtype, bias: bool, again: bool) -> None:
    pair, queue = Pair(dtype, bias), WeightGradients()
    queue.adopt(pair.parameters())
    buffer = GradBuffer(pair.named_parameters(), SINGLE.dp, gradient_dtype=torch.float32)
    buffer.start_step(3)
    streams = RandomStreams(1)
    for key, hidden in enumerate(batches(dtype)):
        hidden.requires_grad_()
        out = recompute(pair, streams, hidden) if again else pair(hidden)
        with queue.collecting(key):
            out.sum().backward()
        assert hidden.grad is not None
    weights = [pair.first.weight, pair.second.weight]
    assert all(weight.main_grad.count_nonzero() == 0 for weight in weights)  # type: ignore[attr-defined]
    assert queue.size == 6
    for key in range(3):
        queue.compute(key)
    assert queue.size == 0
    buffer.finish()
    for found, expected in zip(pair.parameters(), at_once(dtype, bias), strict=True):
        assert torch.equal(found.main_grad, expected)  # type: ignore[attr-defined]


def test_a_queue_that_is_not_collecting_keeps_nothing() -> None:
    pair, queue = Pair(torch.float64), WeightGradients()
    queue.adopt(pair.parameters())
    pair(batches(torch.float64)[0]).sum().backward()
    assert pair.first.weight.grad is not None
    assert queue.size == 0


def test_what_belongs_to_no_queue_is_computed_at_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    rows_in, rows_out = torch.ones(4, 1, 2), torch.ones(4, 1, 3)
    assert not is_deferrable(weight)
    gradient = defer_or_compute(weight, rows_in, rows_out)
    assert gradient is not None
    assert torch.equal(gradient, torch.full((3, 2), 4.0))


def test_products_of_a_micro_batch_are_let_go_once_computed() -> None:
    pair, queue = Pair(torch.float64), WeightGradients()
    queue.adopt(pair.parameters())
    with queue.collecting("a"):
        pair(batches(torch.float64)[0]).sum().backward()
    queue.compute("a")
    with pytest.raises(KeyError):
        queue.compute("a")
