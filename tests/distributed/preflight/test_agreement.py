"""Ranks that differ are named, with what they hold, on every rank."""

import pytest
import torch.distributed as dist

from megatron.errors import ConfigError, MegatronError, NumericsError
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.topology import Topology
from megatron.preflight.agreement import agree_on_launch, agree_on_state
from tests.support.ranks import run_on_ranks


def what_each_rank_is_told() -> list[str]:
    ctx = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=1, pp=1))
    agree_on_launch({"torch": "2.13", "flags": "ab"}, ctx.world)
    agree_on_state({"iteration": 3, "loss scale": 1.0}, ctx.world)
    told = []
    odd = ctx.rank == 2
    for kind, call in (
        (ConfigError, lambda: agree_on_launch({"torch": "2.1" if odd else "2.13"}, ctx.world)),
        (ConfigError, lambda: agree_on_launch({"a": "1"} if odd else {}, ctx.world)),
        (NumericsError, lambda: agree_on_state({"iteration": 3 + ctx.rank}, ctx.world)),
    ):
        try:
            call()
        except MegatronError as error:
            told.append(f"{error.problem}: {error.found}" if type(error) is kind else repr(error))
    return told


def test_every_rank_is_told_who_differs() -> None:
    expected = [
        "the ranks do not run the same thing: torch: 2.13 on rank 0, 1, 2.1 on rank 2",
        "the ranks do not run the same thing: a: (nothing) on rank 0, 1, 1 on rank 2",
        "the ranks are no longer in lockstep: iteration: 3 on rank 0, 4 on rank 1, 5 on rank 2",
    ]
    assert run_on_ranks(3, what_each_rank_is_told) == [expected] * 3


def test_one_rank_agrees_with_itself() -> None:
    alone = Group(ranks=(0,), rank=0)
    agree_on_launch({"torch": "2.13"}, alone)
    agree_on_state({"iteration": 1}, alone)


def test_many_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"x": "a"}] * 6 + [{"x": "b"}]
    monkeypatch.setattr("megatron.preflight.agreement.all_gather_object", lambda facts, world: told)
    with pytest.raises(ConfigError) as caught:
        agree_on_launch({"x": "a"}, Group(ranks=(0,), rank=0))
    assert caught.value.found == "x: a on 6 ranks (0, 1, ... 5), b on rank 6"
