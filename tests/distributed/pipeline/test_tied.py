"""Weights on several stages: one sum of gradients with equal bits, and drift has a name."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.errors import NumericsError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.pipeline.tied import TiedParameters
from tests.support.ranks import run_on_ranks

# Parameter: the stages that hold it. No sum of three of these numbers is exact in any order.
HOLDERS = {"all": (0, 1, 2), "ends": (0, 2), "middle": (1,), "frozen": (1, 2)}


def sum_and_compare() -> tuple[dict[str, Tensor], tuple[str, ...], list[str], str]:
    group = ParallelContext.build(Topology(pp=3)).pp
    named = {
        name: Parameter(
            torch.full((2, 3), 0.5, dtype=torch.bfloat16), requires_grad=name != "frozen"
        )
        for name, holders in HOLDERS.items()
        if group.rank in holders
    }
    tied = TiedParameters(named, group)
    for name, parameter in named.items():
        if name != "frozen":
            parameter.main_grad = torch.full((2, 3), 0.1 * (group.rank + 1))  # type: ignore[attr-defined]
    tied.sum_gradients()
    marked = [name for name, parameter in named.items() if hasattr(parameter, "reduce_first")]
    sums = {name: p.main_grad for name, p in named.items() if name != "frozen"}  # type: ignore[attr-defined]
    tied.check_equal()
    if dist.get_rank() == 2:
        with torch.no_grad():
            named["ends"][1, 1] += 0.25
    try:
        tied.check_equal()
    except NumericsError as error:
        return sums, tied.names, marked, str(error)
    raise AssertionError("the weights differ")


def test_gradients_are_summed_over_those_that_hold_the_weight() -> None:
    found = run_on_ranks(3, sum_and_compare)
    three = torch.full((2, 3), 0.1) + torch.full((2, 3), 0.1 * 2) + torch.full((2, 3), 0.1 * 3)
    two = torch.full((2, 3), 0.1) + torch.full((2, 3), 0.1 * 3)
    for rank, (sums, names, marked, message) in enumerate(found):
        held = sorted(name for name, holders in HOLDERS.items() if rank in holders)
        assert sorted(names) == sorted(marked) == [name for name in held if name != "middle"]
        assert torch.equal(sums["all"], three)
        if "ends" in sums:
            assert torch.equal(sums["ends"], two)
        if "middle" in sums:
            assert torch.equal(sums["middle"], torch.full((2, 3), 0.2))
        assert "different values of weights that they share" in message
        assert "ends, on ranks [0, 1, 2]" in message


def test_a_lone_stage_shares_nothing() -> None:
    weight = Parameter(torch.ones(2))
    tied = TiedParameters({"weight": weight}, ParallelContext.single().pp)
    tied.sum_gradients()
    tied.check_equal()
    assert tied.names == ()
    assert not hasattr(weight, "reduce_first")
