"""Tests of every collective against arithmetic, in a group that is not the world."""

import pytest
import torch

from megatron.mpu import collectives
from tests.distributed.mpu.reference import build
from tests.support.ranks import run_on_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def collectives_are_arithmetic() -> None:
    ctx = build(tp=2)  # with 4 ranks: two tp groups, (0, 1) and (2, 3)
    tp, low = ctx.tp, ctx.tp.ranks[0]
    own, peer = float(ctx.rank), float(ctx.tp.ranks[1 - tp.rank])
    for dtype in DTYPES:
        for op, expected in (
            ("sum", own + peer),
            ("max", max(own, peer)),
            ("min", min(own, peer)),
        ):
            tensor = torch.full((3,), own, dtype=dtype)
            assert collectives.all_reduce(tensor, tp, op=op) is tensor
            assert tensor.tolist() == [expected] * 3
        if dtype.is_floating_point:
            tensor = torch.full((3,), own, dtype=dtype)
            assert collectives.all_reduce(tensor, tp, op="mean").tolist() == [low + 0.5] * 3
        pending = collectives.start_all_reduce(torch.full((3,), own, dtype=dtype), tp)
        assert pending.wait().tolist() == [own + peer] * 3
        tensor = torch.full((2,), own, dtype=dtype)
        assert collectives.broadcast(tensor, tp, source=1) is tensor
        assert tensor.tolist() == [low + 1] * 2


def gathering_and_scattering_work_along_any_dimension() -> None:
    tp = build(tp=2).tp
    for dtype in DTYPES:
        whole = torch.arange(48).view(4, 2, 6).to(dtype)
        for dim in (0, 1, 2, -1):
            part = whole.chunk(2, dim=dim)[tp.rank]  # not contiguous for dim > 0
            assert torch.equal(collectives.all_gather(part, tp, dim=dim), whole)
            scattered = collectives.reduce_scatter(whole, tp, dim=dim)
            assert torch.equal(scattered, 2 * part)
        pending = collectives.start_all_gather(whole.chunk(2)[tp.rank], tp)
        assert torch.equal(pending.wait(), whole)
        pending = collectives.start_reduce_scatter(whole, tp)
        assert torch.equal(pending.wait(), 2 * whole.chunk(2)[tp.rank])
        own = whole.chunk(2)[tp.rank]
        here = torch.full_like(whole, -1.0)
        here.chunk(2)[tp.rank].copy_(own)
        collectives.start_all_gather(here.chunk(2)[tp.rank], tp, out=here).wait()
        assert torch.equal(here, whole)
        collectives.start_reduce_scatter(here, tp, out=here.chunk(2)[tp.rank]).wait()
        assert torch.equal(here.chunk(2)[tp.rank], 2 * own)
    scalars = collectives.all_gather(torch.tensor(float(tp.rank)), tp)
    assert scalars.tolist() == [0.0, 1.0]


def strided_and_empty_tensors_are_reduced_in_place() -> None:
    tp = build(tp=2).tp
    whole = torch.ones(3, 4)
    column = whole[:, 1]
    assert collectives.all_reduce(column, tp) is column
    collectives.broadcast(whole[:, 2].mul_(5.0 + tp.rank), tp, source=1)
    assert whole[0].tolist() == [1, 2, 6, 1]
    assert collectives.all_reduce(torch.empty(0), tp).shape == (0,)


def parts_go_to_every_rank_and_to_the_next() -> None:
    group = build(cp=4).cp
    parts = torch.arange(4.0).view(4, 1) + 10 * group.rank
    assert collectives.all_to_all(parts, group).view(-1).tolist() == [
        group.rank + 10.0 * source for source in range(4)
    ]
    first = collectives.start_shift(parts, group)
    second = collectives.start_shift(parts + 0.5, group)  # messages keep their order
    came_from = (group.rank - 1) % 4
    assert second.wait()[0].item() == 10 * came_from + 0.5
    assert first.wait()[0].item() == 10 * came_from


def rows_go_where_counts_say() -> None:
    group = build(cp=4).cp
    me = group.rank
    # Rank r sends (r + i) % 3 rows to rank i; some nothing.
    sends = [(me + to) % 3 for to in range(4)]
    receives = [(source + me) % 3 for source in range(4)]
    rows = torch.tensor([[10.0 * me + to] for to in range(4) for _ in range(sends[to])])
    found = collectives.start_all_to_all_rows(rows.view(-1, 1), sends, receives, group).wait()
    assert found.view(-1).tolist() == [
        10.0 * source + me for source in range(4) for _ in range(receives[source])
    ]
    nothing = collectives.start_all_to_all_rows(torch.empty(0, 2), [0] * 4, [0] * 4, group).wait()
    assert nothing.shape == (0, 2)


def objects_travel() -> None:
    ctx = build(tp=2)
    own = {"rank": ctx.rank}
    assert collectives.all_gather_object(own, ctx.tp) == [{"rank": r} for r in ctx.tp.ranks]
    assert collectives.broadcast_object(own, ctx.tp, source=1) == {"rank": ctx.tp.ranks[1]}
    collectives.barrier(ctx.tp)
    collectives.barrier(ctx.world)


@pytest.mark.parametrize(
    "body",
    [
        collectives_are_arithmetic,
        gathering_and_scattering_work_along_any_dimension,
        strided_and_empty_tensors_are_reduced_in_place,
        parts_go_to_every_rank_and_to_the_next,
        rows_go_where_counts_say,
        objects_travel,
    ],
)
def test_collectives(body: object) -> None:
    run_on_ranks(4, body)
