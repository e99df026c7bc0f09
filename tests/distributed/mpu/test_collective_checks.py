"""--check-collectives on real ranks: every way to differ is named on every rank, within seconds."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megatron.errors import CollectiveError
from megatron.mpu import collectives as c
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.mappings import reduce_from_tp
from megatron.mpu.topology import Topology
from megatron.pipeline.p2p import GroupExchanger, PipelineMessage
from tests.support.ranks import run_on_ranks

RANKS, ODD = 3, 1
PATIENCE_S = 2.0
Scenario = Callable[[Group, bool], Any]


def another_shape(group: Group, odd: bool) -> None:
    c.all_reduce(torch.ones(5 if odd else 4), group)


def another_dtype(group: Group, odd: bool) -> None:
    c.all_gather(torch.ones(4, dtype=torch.int32 if odd else torch.int64), group, dim=0)


def another_reduction(group: Group, odd: bool) -> None:
    c.all_reduce(torch.ones(4), group, op="max" if odd else "sum")


def another_collective(group: Group, odd: bool) -> None:
    if odd:
        c.start_reduce_scatter(torch.ones(3), group).wait()
    else:
        c.start_all_gather(torch.ones(3), group).wait()


def another_source(group: Group, odd: bool) -> None:
    c.broadcast(torch.ones(3), group, source=int(odd))


def one_skips(group: Group, odd: bool) -> None:
    if not odd:
        c.all_reduce(torch.ones(4), group)
    c.all_gather_object("x", group)


def other_rows(group: Group, odd: bool) -> None:
    rows = torch.ones(3 if odd else 6, 4 if odd else 3)
    c.start_all_to_all_rows(rows, [len(rows) // 3] * 3, [2, 1, 2], group).wait()


def order_swapped(group: Group, odd: bool) -> None:
    calls = [partial(c.barrier, group), partial(c.broadcast_object, "x", group)]
    for call in reversed(calls) if odd else calls:
        call()


def in_a_layer(group: Group, odd: bool) -> None:
    reduce_from_tp(torch.ones(2, 7 if odd else 6), group)


def one_never_comes(group: Group, odd: bool) -> None:
    if odd:
        time.sleep(PATIENCE_S + 1)
    else:
        c.all_reduce(torch.ones(4), group)


def one_comes_too_late(group: Group, odd: bool) -> None:
    if odd:
        time.sleep(PATIENCE_S + 1)
    c.all_reduce(torch.ones(4), group)


def one_is_late_but_in_time(group: Group, odd: bool) -> list[float]:
    if odd:
        time.sleep(PATIENCE_S / 2)
    return c.all_reduce(torch.ones(2), group).tolist()


def all_is_well(group: Group, odd: bool) -> list[list[float]]:
    own = torch.full((3,), float(group.rank))
    sums = c.all_reduce(own.clone(), group)
    gathered = c.all_gather(own[:1], group)
    part = c.reduce_scatter(own.expand(2, 3), group, dim=1)
    c.barrier(group)
    received = c.broadcast_object(group.rank, group, source=2)
    peers = [peer for peer in range(RANKS) if peer != group.rank]
    room = [torch.zeros(3) for _ in peers]
    batch = [PipelineMessage(True, peer, (own,), "numbers") for peer in peers]
    batch += [PipelineMessage(False, peer, (r,), "numbers") for peer, r in zip(peers, room)]
    GroupExchanger(group).exchange(batch)
    return [
        sums.tolist(),
        gathered.tolist(),
        part.flatten().tolist(),
        [received],
        sum(room).tolist(),
    ]


def a_message_of_another_shape(group: Group, odd: bool) -> None:
    if group.rank == 2:
        return
    tensor = torch.zeros(3 if odd else 2)
    GroupExchanger(group).exchange(
        [PipelineMessage(not odd, 0 if odd else 1, (tensor,), "an activation")]
    )


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        another_shape,
        another_dtype,
        another_reduction,
        another_collective,
        another_source,
        one_skips,
        order_swapped,
        other_rows,
        in_a_layer,
        one_never_comes,
        one_comes_too_late,
        one_is_late_but_in_time,
        all_is_well,
        a_message_of_another_shape,
    )
}


def play() -> dict[str, tuple[Any, float]]:
    """Every scenario in groups of its own: what it returned or raised, and after how long."""
    found = {}
    for name, scenario in SCENARIOS.items():
        ctx = ParallelContext.build(Topology(tp=RANKS), check_seconds=PATIENCE_S)
        start = time.monotonic()
        try:
            result = scenario(ctx.tp, ctx.rank == ODD)
        except CollectiveError as error:
            result = str(error)
        found[name] = (result, time.monotonic() - start)
    return found


@pytest.fixture(scope="module")
def played() -> list[dict[str, tuple[Any, float]]]:
    return run_on_ranks(RANKS, play)


HERE = "tests/distributed/mpu/test_collective_checks.py:"


@pytest.mark.parametrize(
    ("name", "usual", "odd"),
    [
        ("another_shape", "all_reduce(sum) of [4] float32", "all_reduce(sum) of [5] float32"),
        ("another_dtype", "all_gather(dim=0) of [4] int64", "all_gather(dim=0) of [4] int32"),
        ("another_reduction", "all_reduce(sum) of [4]", "all_reduce(max) of [4]"),
        ("another_collective", "all_gather of [3]", "reduce_scatter of [3]"),
        ("another_source", "broadcast(source=0) of [3]", "broadcast(source=1) of [3]"),
        ("one_skips", "all_reduce(sum) of [4]", "all_gather_object at"),
        ("order_swapped", "barrier at", "broadcast_object(source=0) at"),
        ("other_rows", "all_to_all_rows of [0, 3]", "all_to_all_rows of [0, 4]"),
        ("in_a_layer", "all_reduce(sum) of [2, 6]", "all_reduce(sum) of [2, 7]"),
    ],
)
def test_what_differs_is_named_on_every_rank_at_once(
    played: list[dict[str, tuple[Any, float]]], name: str, usual: str, odd: str
) -> None:
    texts = [results[name][0] for results in played]
    assert texts[0] == texts[1] == texts[2]
    first, call, *ranks, fix = texts[0].splitlines()
    assert first == "ranks that communicate do not do the same"
    assert "call 1 of the group of ranks 0 1 2: rank 1 differs" in call
    for rank, wanted in enumerate((usual, odd, usual)):
        assert ranks[rank].strip().startswith(f"rank {rank}: {wanted}")
        assert HERE in ranks[rank]
    assert "in the same order" in fix
    assert max(results[name][1] for results in played) < PATIENCE_S


def test_a_line_in_a_parallel_layer_is_named_with_the_code_that_uses_it(
    played: list[dict[str, tuple[Any, float]]],
) -> None:
    text = played[0]["in_a_layer"][0]
    assert "at megatron/mpu/mappings.py:" in text
    assert "(from " in text


def test_a_rank_that_does_not_come_is_named_by_those_who_wait(
    played: list[dict[str, tuple[Any, float]]],
) -> None:
    for name in ("one_never_comes", "one_comes_too_late"):
        waited = []
        for rank in (0, 2):
            text, seconds = played[rank][name]
            assert text.startswith("a rank has not come to a call that others wait in")
            assert "rank 1, whose last call was none yet" in text
            waited.append(seconds)
        # One that came later hears the verdict of the one whose patience ended first.
        assert PATIENCE_S <= max(waited) < PATIENCE_S + 2
    assert played[ODD]["one_never_comes"][0] is None
    assert "after others had given up waiting for it" in played[ODD]["one_comes_too_late"][0]


def test_what_is_right_goes_on_as_without_checks(
    played: list[dict[str, tuple[Any, float]]],
) -> None:
    for rank, results in enumerate(played):
        assert results["one_is_late_but_in_time"][0] == [3.0, 3.0]
        assert results["all_is_well"][0] == [
            [3.0] * 3,
            [0.0, 1.0, 2.0],
            [3.0, 3.0],
            [2],
            [3.0 - rank] * 3,
        ]


def test_both_ends_of_a_message_hear_that_they_differ(
    played: list[dict[str, tuple[Any, float]]],
) -> None:
    texts = [results["a_message_of_another_shape"][0] for results in played]
    assert texts[0] == texts[1]
    assert "call 1 of the messages from rank 0 to 1: ranks 0, 1 differ" in texts[0]
    assert "rank 0: message of [2] float32 at megatron/pipeline/p2p.py:" in texts[0]
    assert texts[2] is None


def test_nothing_is_asked_of_the_store_without_the_flag() -> None:
    assert ParallelContext.single().tp.observer is None
    assert run_on_ranks(2, unchecked) == [True, True]


def unchecked() -> bool:
    ctx = ParallelContext.build(Topology(tp=2))
    groups = (ctx.world, ctx.tp, ctx.pp, ctx.dp, ctx.model)
    return all(group.observer is None for group in groups)
