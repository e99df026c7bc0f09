"""Sums of scalars on one rank; over several they are part of every step of tests/distributed."""

import math

import torch

from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import HostScalars, ScalarSums, flags_on_device

ALONE = ParallelContext.single().world


def test_sums_come_back_by_name_in_float64() -> None:
    sums = ScalarSums(ALONE)
    sums.add("pair", torch.tensor([1.5, 2.0]))
    sums.add("count", torch.tensor(2**40))
    sums.add("flags", flags_on_device((False, True, False)))
    sums.add("none", flags_on_device(()))
    reduced = sums.reduce()
    assert {name: values.dtype for name, values in reduced.items()} == dict.fromkeys(
        ("pair", "count", "flags", "none"), torch.float64
    )
    assert HostScalars(reduced).read() == {
        "pair": [1.5, 2.0],
        "count": [2.0**40],
        "flags": [0.0, 1.0, 0.0],
        "none": [],
    }


def test_what_does_not_contribute_is_zero_even_if_it_is_not_finite() -> None:
    sums = ScalarSums(ALONE)
    sums.add("here", torch.tensor([math.nan, 1.0]))
    sums.add("elsewhere", torch.tensor([math.nan, math.inf]), contributes=False)
    found = HostScalars(sums.reduce()).read()
    assert math.isnan(found["here"][0])
    assert found["elsewhere"] == [0.0, 0.0]


def test_values_are_those_of_the_moment_of_the_copy() -> None:
    value = torch.tensor(1.0)
    copied = HostScalars({"value": value, "flag": torch.tensor(True)})
    value.fill_(2.0)
    assert copied.read() == copied.read() == {"value": [1.0], "flag": [1.0]}
