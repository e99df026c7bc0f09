"""Tests of recomputation around layers that communicate and draw from both streams."""

import torch
import torch.nn.functional as F

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.partition import Init
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from tests.distributed.mpu.reference import build, fill, sample
from tests.support.ranks import run_on_ranks


def a_recomputed_layer_is_bit_equal() -> tuple[list[object], list[object]]:
    ctx = build(tp=2)
    up = ColumnParallelLinear(8, 64, ctx=ctx, init=Init("normal"), dtype=torch.float64)
    down = RowParallelLinear(64, 8, ctx=ctx, init=Init("normal"), dtype=torch.float64)
    for seed, parameter in enumerate([*up.parameters(), *down.parameters()]):
        fill(parameter, ctx, seed=seed)

    def train(recomputing: bool) -> list[torch.Tensor]:
        streams = RandomStreams(1, tp_rank=ctx.tp.rank)
        hidden = sample(4, 2, 8, seed=9).requires_grad_()

        def layer(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inner = up(hidden)
            with streams.fork("tensor"):
                kept = F.dropout(torch.ones_like(inner), 0.5)
            with streams.fork("replicated"):
                return F.dropout(down(inner * kept), 0.5), kept

        output, kept = recompute(layer, streams, hidden) if recomputing else layer(hidden)
        output.sum().backward()
        gradients = [p.grad.clone() for p in [*up.parameters(), *down.parameters()]]
        up.zero_grad()
        down.zero_grad()
        return [output, kept, hidden.grad, *gradients]

    plain, recomputed = train(False), train(True)
    assert all(torch.equal(left, right) for left, right in zip(plain, recomputed, strict=True))
    output, kept = plain[0].detach(), plain[1].detach()
    return output.tolist(), kept.tolist()


def test_recomputed_layers_are_bit_equal_and_streams_fall_as_they_should() -> None:
    (output, kept), (other_output, other_kept) = run_on_ranks(2, a_recomputed_layer_is_bit_equal)
    assert output == other_output  # replicated: the same numbers on both ranks
    assert kept != other_kept  # tensor: not the same
