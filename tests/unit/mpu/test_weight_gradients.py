"""Gradients of weights that wait: the same bits, once per key, through the same hooks."""

import pytest
import torch
from torch import Tensor

from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from megatron.mpu.weight_gradients import (
    WeightGradients,
    add_product,
    alias_of,
    bypasses_autograd,
    defer_or_compute,
    gradient_sum,
)
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


def buffer_of(pair: Pair, fuse: bool) -> GradBuffer:
    return GradBuffer(
        pair.named_parameters(),
        SINGLE.replicas,
        gradient_dtype=torch.float32,
        fuse_accumulation=fuse,
    )


def at_once(dtype: torch.dtype, bias: bool = True, *, fuse: bool) -> list[Tensor]:
    pair = Pair(dtype, bias)
    buffer = buffer_of(pair, fuse)
    for hidden in batches(dtype):
        pair(hidden).sum().backward()
    del buffer
    return [parameter.main_grad for parameter in pair.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_late_gradients_have_the_same_bits(
    dtype: torch.dtype, bias: bool, again: bool, fuse: bool
) -> None:
    pair, queue = Pair(dtype, bias), WeightGradients()
    queue.adopt(pair.parameters())
    buffer = buffer_of(pair, fuse)
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
    for found, expected in zip(pair.parameters(), at_once(dtype, bias, fuse=fuse), strict=True):
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
    assert not bypasses_autograd(weight)
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


# Of sums of a few dozen numbers near one. Products in half precision are rounded before they are
# added, with and without fusion, on a CPU.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.0}


@pytest.mark.parametrize("dtype", ROUNDING)
def test_products_that_add_to_the_buffer_give_the_same_sums(dtype: torch.dtype) -> None:
    fused, plain = at_once(dtype, fuse=True), at_once(dtype, fuse=False)
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_a_fused_product_makes_no_gradient_of_its_own() -> None:
    pair = Pair(torch.float32)
    buffer = buffer_of(pair, fuse=True)
    given: list[Tensor | None] = []
    pair.first.weight.register_hook(given.append)  # type: ignore[no-untyped-call]
    pair(batches(torch.float32)[0]).sum().backward()
    assert not any(gradient is not None for gradient in given)
    main_grad: Tensor = pair.first.weight.main_grad  # type: ignore[attr-defined]
    assert pair.first.weight.grad is main_grad  # from then on, as without fusion
    assert main_grad.count_nonzero() == main_grad.numel()
    buffer.finish()


def test_a_weight_that_is_used_twice_has_both_products() -> None:
    sums = []
    for fuse in (True, False):
        pair = Pair(torch.float64, bias=False)
        buffer = buffer_of(pair, fuse)
        for hidden in batches(torch.float64):
            pair(pair(hidden)).sum().backward()
        buffer.finish()
        sums.append([weight.main_grad for weight in pair.parameters()])  # type: ignore[attr-defined]
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_what_autograd_has_beside_a_product_is_added_to_it() -> None:
    sums = []
    for fuse in (True, False):
        pair = Pair(torch.float64, bias=False)
        buffer = buffer_of(pair, fuse)
        for hidden in batches(torch.float64):
            (pair(hidden).sum() + pair.first.weight.square().sum()).backward()
        buffer.finish()
        sums.append(pair.first.weight.main_grad)  # type: ignore[attr-defined]
    torch.testing.assert_close(*sums, rtol=1e-13, atol=1e-13)


def test_an_alias_of_a_weight_has_its_gradient_where_the_weight_has() -> None:
    pair = Pair(torch.float64)
    assert gradient_sum(alias_of(pair.first.weight)) is None
    buffer_of(pair, fuse=True)
    place = gradient_sum(alias_of(pair.first.weight))
    assert place is not None
    assert place is gradient_sum(pair.first.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_first_product_replaces_what_was_there(dtype: torch.dtype) -> None:
    total = torch.full((3, 2), float("nan"), dtype=torch.promote_types(dtype, torch.float32))
    rows_out, rows_in = torch.ones(4, 3, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    add_product(total, rows_out, rows_in, is_first=True)
    assert torch.equal(total, torch.full_like(total, 4.0))
    add_product(total, rows_out, rows_in, is_first=False)
    assert torch.equal(total, torch.full_like(total, 8.0))
