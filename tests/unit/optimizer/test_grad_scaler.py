"""Tests of megatron.optimizer.grad_scaler."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import CheckpointError, NumericsError
from megatron.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler


def dynamic(
    scale: float = 1024.0, *, minimum: float = 1.0, window: int = 3, hysteresis: int = 2
) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=scale, min_scale=minimum, growth_interval=window, hysteresis=hysteresis
    )


def scales(scaler: DynamicGradScaler, overflows: str) -> list[float]:
    """The scale after each of the iterations; `x` is an overflow and `.` a good one."""
    values = []
    for mark in overflows:
        too_small = scaler.update(torch.tensor(mark == "x"))
        values.append(float(scaler.scale))
        scaler.check(too_small=bool(too_small), scale=values[-1])
    return values


def test_a_constant_scale_stays() -> None:
    scaler = ConstantGradScaler(8.0)
    assert not scaler.update(torch.tensor(True))
    scaler.check(too_small=True, scale=8.0)
    scaler.load_state_dict(dynamic().state_dict())
    assert (scaler.scale, scaler.state_dict(), scaler.expects_overflow) == (8.0, {}, False)


def test_the_scale_doubles_after_a_window_without_overflow() -> None:
    assert scales(dynamic(), "......") == [1024, 1024, 2048, 2048, 2048, 4096]


def test_an_overflow_starts_the_window_anew() -> None:
    assert scales(dynamic(), "..x..") == [1024] * 5
    assert scales(dynamic(), "..x...")[-1] == 2048


def test_the_scale_halves_after_hysteresis_overflows() -> None:
    assert scales(dynamic(), "xx") == [1024, 512]
    assert scales(dynamic(hysteresis=1), "xx") == [512, 256]
    assert scales(dynamic(hysteresis=3), "xxx") == [1024, 1024, 512]


def test_hysteresis_is_refilled_after_a_halving() -> None:
    assert scales(dynamic(), "xxxxxx") == [1024, 512, 512, 256, 256, 128]
    assert scales(dynamic(), "xx.x.x") == [1024, 512, 512, 512, 512, 256]


def test_hysteresis_is_refilled_after_a_doubling() -> None:
    assert scales(dynamic(), "x...x")[-1] == 2048


def test_an_overflow_at_the_smallest_scale_ends_the_run() -> None:
    scaler = dynamic(scale=2.0, hysteresis=1)
    assert scales(scaler, "x") == [1.0]
    with pytest.raises(
        NumericsError,
        match=r"at its minimum(.|\n)*loss scale 1, --min-loss-scale 1(.|\n)*--bf16",
    ):
        scales(scaler, "x")
    assert scaler.scale == 1.0


@given(st.text(alphabet="..x", max_size=60), st.text(alphabet="..x", max_size=60))
def test_a_scaler_goes_on_from_its_state(before: str, after: str) -> None:
    scaler, other = dynamic(2.0**80), dynamic(1.0)
    scales(scaler, before)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert scales(scaler, after) == scales(other, after)


def test_state_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no state of a dynamic loss scale(.|\n)*none"):
        dynamic().load_state_dict(ConstantGradScaler().state_dict())
