"""Tests of recomputation around layers that communicate and drop."""

import torch

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.offload import Offload
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams, Samples
from megatron.mpu.recompute import recompute, split_over
from megatron.ops.dropout import dropout_add
from tests.distributed.mpu.reference import build, fill, sample
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import run_on_ranks


def drop(streams: RandomStreams, x: torch.Tensor) -> torch.Tensor:
    """Drop a third of `x` by the present samples."""
    return dropout_add(x, None, 0.3, torch.tensor(3), streams.rows(len(x), x.device))


def a_recomputed_layer_is_bit_equal() -> list[object]:
    ctx = build(tp=2)
    up = ColumnParallelLinear(8, 64, ctx=ctx, init=Init("normal"), dtype=torch.float64)
    down = RowParallelLinear(64, 8, ctx=ctx, init=Init("normal"), dtype=torch.float64)
    for seed, parameter in enumerate([*up.parameters(), *down.parameters()]):
        fill(parameter, ctx, seed=seed)

    def train(recomputing: bool) -> list[torch.Tensor]:
        streams = RandomStreams(1)
        hidden = sample(4, 2, 8, seed=9).requires_grad_()

        def layer(hidden: torch.Tensor) -> torch.Tensor:
            return drop(streams, down(drop(streams, up(hidden))))

        with streams.of(Samples(0, 4)):
            output = recompute(layer, streams, hidden) if recomputing else layer(hidden)
        output.sum().backward()
        gradients = [p.grad.clone() for p in [*up.parameters(), *down.parameters()]]
        up.zero_grad()
        down.zero_grad()
        return [output, hidden.grad, *gradients]

    plain, recomputed = train(False), train(True)
    assert all(torch.equal(left, right) for left, right in zip(plain, recomputed, strict=True))
    return plain[0].detach().tolist()


def test_recomputed_layers_are_bit_equal() -> None:
    output, other_output = run_on_ranks(2, a_recomputed_layer_is_bit_equal)
    assert output == other_output


ELEMENTS = 7 * 2 * 33  # no multiple of the ranks: the last part is padded


def inputs_are_split_over_the_ranks() -> tuple[int, int]:
    ctx = build(tp=4)
    streams = RandomStreams(1)
    weight = sample(33, 33, seed=4).requires_grad_()

    def layer(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return drop(streams, (hidden * ids) @ weight)

    def train(splitting: bool, offload: Offload | None = None) -> tuple[list[torch.Tensor], int]:
        start = sample(7, 2, 33, seed=9).requires_grad_()
        ids = torch.arange(33)
        with streams.of(Samples(0, 1)), LiveBytes([weight, ids, start]) as live:
            hidden = start + 1  # which itself keeps nothing
            for _ in range(3):
                if splitting:
                    with split_over(ctx.tp, offload=offload):
                        hidden = recompute(layer, streams, hidden, ids)
                else:
                    hidden = recompute(layer, streams, hidden, ids)
            kept = live.count
        hidden.square().sum().backward()
        gradients = [weight.grad, start.grad]
        weight.grad = None
        return [hidden, *(g for g in gradients if g is not None)], kept

    (plain, all_kept), (split, part_kept) = train(False), train(True)
    offloaded, _ = train(True, Offload())
    assert all(torch.equal(one, other) for one, other in zip(plain, split, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    return all_kept, part_kept


def test_inputs_that_are_split_come_back_bit_for_bit_and_take_their_share() -> None:
    part = -(-ELEMENTS // 4)
    for whole, split in run_on_ranks(4, inputs_are_split_over_the_ranks):
        # Of three inputs; what autograd keeps beside them is the same.
        assert whole - split == 3 * 8 * (ELEMENTS - part)
