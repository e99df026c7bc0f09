"""Tests of the parallel layers: outputs and gradients equal those of the whole layer in fp64.

`split` is sequence parallelism: what stands between the layers is this rank's part of the sequence.
"""

from collections import Counter
from contextlib import AbstractContextManager
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import ConfigError, DataError
from megatron.mpu import collectives
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_with_input_reduction,
)
from megatron.mpu.mappings import sequence_part
from megatron.mpu.partition import Init
from megatron.mpu.weight_gradients import GradientSum
from megatron.spans import Communication
from tests.distributed.mpu.reference import EXACT, build, fill, own_part, sample
from tests.support.ranks import run_on_ranks

NORMAL = Init("normal")
FP64 = torch.float64
LENGTH = 8  # tokens of a sequence


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **EXACT)


def tokens_of(ctx: ParallelContext, split: bool) -> slice:
    """The tokens that this rank holds between layers, of LENGTH."""
    return sequence_part(LENGTH, ctx.tp) if split else slice(0, LENGTH)


def summed(gradient: Tensor, ctx: ParallelContext, split: bool) -> Tensor:
    """The gradient of an unsplit parameter; under sequence parallelism of all ranks' summands."""
    return all_reduce(gradient.clone(), ctx.tp) if split else gradient


def noting(shapes: list[torch.Size]) -> AbstractContextManager[None]:
    """Write down the shapes of what is saved for backward."""

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def applied(
    layer: ColumnParallelLinear | RowParallelLinear, hidden: Tensor, opaque: bool
) -> Tensor:
    """Return the output; where `opaque` by the operator that compiled graphs call."""
    if not opaque:
        return layer(hidden)  # type: ignore[no-any-return]
    layer.weight.grad = torch.empty_like(layer.weight)  # the buffer that products are added to
    GradientSum(layer.weight.grad).accept_products(layer.weight, arrived=lambda: None)
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        return layer(hidden)  # type: ignore[no-any-return]


def column_linear_is_linear(tp: int, blocks: int, split: bool, opaque: bool, on_ring: bool) -> None:
    ctx = build(tp)
    layer = ColumnParallelLinear(
        6,
        16,
        ctx=ctx,
        init=NORMAL,
        blocks=blocks,
        sequence_parallel=split,
        dtype=FP64,
    ).on_ring(on_ring)
    weight, bias = fill(layer.weight, ctx, seed=1), fill(layer.bias, ctx, seed=2)
    whole_hidden, tokens = sample(LENGTH, 2, 6, seed=3).requires_grad_(), tokens_of(ctx, split)
    hidden = whole_hidden.detach()[tokens].clone().requires_grad_()
    expected, upstream = F.linear(whole_hidden, weight, bias), sample(LENGTH, 2, 16, seed=4)
    expected.backward(upstream)

    def part_of_rank(whole: Tensor) -> Tensor:
        return own_part(whole.permute(2, 0, 1), layer.bias, ctx).permute(1, 2, 0)

    saved: list[torch.Size] = []
    with noting(saved):
        output = applied(layer, hidden, opaque)
    # What was gathered is not kept: in backward it is gathered again.
    assert tp == 1 or hidden.shape in saved
    assert tokens == slice(0, LENGTH) or whole_hidden.shape not in saved
    close(output, part_of_rank(expected))
    output.backward(part_of_rank(upstream))
    close(hidden.grad, whole_hidden.grad[tokens])
    close(layer.weight.grad, own_part(weight.grad, layer.weight, ctx))
    close(layer.bias.grad, own_part(bias.grad, layer.bias, ctx))


def row_linear_is_linear(tp: int, split: bool, opaque: bool, on_ring: bool) -> None:
    ctx = build(tp)
    layer = RowParallelLinear(
        8,
        6,
        ctx=ctx,
        init=NORMAL,
        sequence_parallel=split,
        dtype=FP64,
    ).on_ring(on_ring)
    weight, bias = fill(layer.weight, ctx, seed=1), fill(layer.bias, ctx, seed=2)
    whole, tokens = sample(LENGTH, 2, 8, seed=3).requires_grad_(), tokens_of(ctx, split)
    expected, upstream = F.linear(whole, weight, bias), sample(LENGTH, 2, 6, seed=4)
    expected.backward(upstream)

    def part_of_rank(tensor: Tensor) -> Tensor:
        return tensor.chunk(tp, dim=-1)[ctx.tp.rank]

    hidden = part_of_rank(whole.detach()).clone().requires_grad_()
    output = applied(layer, hidden, opaque)
    close(output, expected[tokens])
    output.backward(upstream[tokens])
    close(hidden.grad, part_of_rank(whole.grad))
    close(layer.weight.grad, own_part(weight.grad, layer.weight, ctx))
    close(summed(layer.bias.grad, ctx, split), bias.grad)  # the same on every rank


def embedding_is_a_lookup(tp: int, split: bool) -> None:
    ctx = build(tp)
    table = VocabParallelEmbedding(
        12, 6, ctx=ctx, true_size=10, init=NORMAL, sequence_parallel=split, dtype=FP64
    )
    weight, tokens = fill(table.weight, ctx, seed=1), tokens_of(ctx, split)
    ids = torch.tensor([[0, 9, 3], [3, 5, 8]] * (LENGTH // 2))
    expected, upstream = F.embedding(ids, weight), sample(LENGTH, 3, 6, seed=2)
    expected.backward(upstream)
    output = table(ids)
    assert torch.equal(output, expected[tokens])  # one rank's value plus zeros
    output.backward(upstream[tokens])
    close(table.weight.grad, own_part(weight.grad, table.weight, ctx))
    with pytest.raises(DataError, match="a token id is outside the vocabulary"):
        table(torch.tensor([10]))
    if split and tp > 1:
        with pytest.raises(ConfigError, match="cannot be shared out evenly"):
            table(ids[1:])


def logits_of_a_split_sequence_and_frozen_parts(tp: int) -> None:
    """What is tied collects both gradients; of what is frozen only the other one is computed."""
    ctx = build(tp)
    table = VocabParallelEmbedding(
        12, 6, ctx=ctx, true_size=12, init=NORMAL, sequence_parallel=True, dtype=FP64
    )
    weight, tokens = fill(table.weight, ctx, seed=1), tokens_of(ctx, True)
    ids, upstream = torch.arange(LENGTH).unsqueeze(1), sample(LENGTH, 1, 12, seed=2)

    def scores(hidden: Tensor, of: Tensor) -> Tensor:
        return linear_with_input_reduction(hidden, of, None, ctx.tp, sequence_parallel=True)

    own_upstream = upstream.chunk(tp, dim=-1)[ctx.tp.rank]
    F.linear(F.embedding(ids, weight), weight).backward(upstream)
    scores(table(ids), table.weight).backward(own_upstream)
    close(table.weight.grad, own_part(weight.grad, table.weight, ctx))
    whole = sample(LENGTH, 1, 6, seed=3).requires_grad_()
    F.linear(whole, weight.detach()).backward(upstream)
    own = whole.detach()[tokens].clone().requires_grad_()
    scores(own, table.weight.detach()).backward(own_upstream)
    close(own.grad, whole.grad[tokens])
    weight.grad = table.weight.grad = None
    F.linear(whole.detach(), weight).backward(upstream)
    scores(own.detach(), table.weight).backward(own_upstream)
    close(table.weight.grad, own_part(weight.grad, table.weight, ctx))


def tied_logits_and_frozen_inputs(tp: int) -> None:
    """A weight used twice collects both gradients; a frozen input needs no reduction."""
    ctx = build(tp)
    table = VocabParallelEmbedding(12, 6, ctx=ctx, true_size=12, init=NORMAL, dtype=FP64)
    weight = fill(table.weight, ctx, seed=1)
    ids, upstream = torch.tensor([[0, 11, 3]]), sample(1, 3, 12, seed=2)
    F.linear(F.embedding(ids, weight), weight).backward(upstream)
    logits = linear_with_input_reduction(table(ids), table.weight, None, ctx.tp)
    logits.backward(upstream.chunk(tp, dim=-1)[ctx.tp.rank])
    close(table.weight.grad, own_part(weight.grad, table.weight, ctx))
    frozen = sample(2, 6, seed=3)
    linear_with_input_reduction(frozen, table.weight, None, ctx.tp).sum().backward()
    assert frozen.grad is None


def two_layers_agree_on_a_grid_with_data_parallelism() -> None:
    """tp = 2 x dp = 2: each replica's gradients are those of its own samples."""
    ctx = build(tp=2)
    up = ColumnParallelLinear(6, 8, ctx=ctx, init=NORMAL, dtype=FP64)
    down = RowParallelLinear(8, 6, ctx=ctx, init=NORMAL, dtype=FP64)
    parameters = [up.weight, up.bias, down.weight, down.bias]
    whole = [fill(parameter, ctx, seed=seed) for seed, parameter in enumerate(parameters)]
    hidden = sample(3, 2, 6, seed=10 + ctx.dp.rank)
    F.linear(F.gelu(F.linear(hidden, *whole[:2])), *whole[2:]).square().sum().backward()
    down(F.gelu(up(hidden))).square().sum().backward()
    for parameter, reference in zip(parameters, whole):
        close(parameter.grad, own_part(reference.grad, parameter, ctx))


def every_layer(tp: int, split: bool) -> None:
    for opaque, on_ring in product((False, True), (False, True) if split else (False,)):
        for blocks in (1, 2):
            column_linear_is_linear(tp, blocks, split, opaque, on_ring)
        row_linear_is_linear(tp, split, opaque, on_ring)
    embedding_is_a_lookup(tp, split)
    if split:
        logits_of_a_split_sequence_and_frozen_parts(tp)
    else:
        tied_logits_and_frozen_inputs(tp)


def parts_on_their_way_are_not_read(tp: int) -> None:
    """Results are the same where a part is no number until it was waited for.

    Bit for bit: sums of whole numbers round nothing, so neither the order of ranks nor the kernel
    that a library takes for a matrix of that height is of any matter.
    """
    ctx = build(tp)
    options: dict[str, Any] = {"ctx": ctx, "init": NORMAL, "bias": False, "dtype": FP64}
    for kind, width in ((ColumnParallelLinear, 16), (RowParallelLinear, 16 // tp)):
        found = []
        for on_ring in (False, True):
            layer = kind(16, 16, sequence_parallel=True, **options).on_ring(on_ring)
            fill(layer.weight, ctx, seed=1)
            layer.weight.data.mul_(64).round_()
            rows = LENGTH // tp if kind is ColumnParallelLinear else LENGTH
            inner = 16 if kind is ColumnParallelLinear else width
            hidden = sample(rows, 2, inner, seed=5 + ctx.rank).mul(64).round().requires_grad_()
            with patch.object(collectives, "start_shift", late_shift):
                output = layer(hidden)
                output.backward(sample(*output.shape, seed=9 + ctx.rank).mul(64).round())
            found.append((output.detach(), hidden.grad, layer.weight.grad))
        for one, other in zip(*found):
            assert torch.equal(one, other)


START_SHIFT = collectives.start_shift


def late_shift(tensor: Tensor, group: Group) -> collectives.Pending:
    """Begin a shift whose result is there when it is waited for, and no moment before."""
    pending = START_SHIFT(tensor, group)
    arrived = pending.wait().clone()
    pending.tensor.fill_(torch.nan)

    def arrive() -> None:
        pending.tensor.copy_(arrived)

    return collectives.Pending(pending.tensor, cast(Any, SimpleNamespace(wait=arrive)), tensor)


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_of_a_sequence_on_a_ring_give_the_same_bits_and_are_not_read_early(tp: int) -> None:
    run_on_ranks(tp, parts_on_their_way_are_not_read, tp)


def communication_of_a_layer() -> dict[str, int]:
    """The calls in a trace of two layers that work on parts, forward and backward."""
    ctx = build(2)
    options: dict[str, Any] = {"ctx": ctx, "init": NORMAL, "dtype": FP64}
    up = ColumnParallelLinear(6, 8, sequence_parallel=True, **options).on_ring(True)
    down = RowParallelLinear(8, 6, sequence_parallel=True, **options).on_ring(True)
    for seed, layer in enumerate((up, down)):
        fill(layer.weight, ctx, seed=seed)
        fill(layer.bias, ctx, seed=seed)
    hidden = sample(LENGTH // 2, 2, 6, seed=5).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        down(up(hidden)).sum().backward()
    calls = (Communication.read(event.name) for event in seen.events() or ())
    return Counter(call.operation for call in calls if call is not None)


def test_two_layers_send_parts_three_times_and_gather_once() -> None:
    """Into both matrices and out of one; the gathered input of the weight's gradient is whole."""
    expected = {"shift": 3, "all_gather": 1, "reduce_scatter": 1}
    assert run_on_ranks(2, communication_of_a_layer) == [expected] * 2


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("split", [False, True])
def test_layers_equal_the_whole_layers(tp: int, split: bool) -> None:
    run_on_ranks(tp, every_layer, tp, split)


def test_two_layers_agree_on_a_grid_with_data_parallelism() -> None:
    run_on_ranks(4, two_layers_agree_on_a_grid_with_data_parallelism)
