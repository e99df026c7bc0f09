"""Tests of megatron.optimizer.clip_grads; grids of ranks are in tests/distributed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.mpu.context import ParallelContext
from megatron.optimizer.clip_grads import (
    clip_factor,
    count_zeros,
    global_norm,
    owned_by_this_rank,
    parameters_norm,
)

SINGLE = ParallelContext.single()
# Relative error of a float32 norm: each tensor's norm is rounded once to 24 bits, and its sum of
# squares a few times; 1e-6 is 16 roundings.
FP32_NORM = 1e-6
FP64_NORM = 1e-14


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(50, 40), (7,), (), (1000,)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        (torch.float64, FP64_NORM),
        (torch.float32, FP32_NORM),
        (torch.bfloat16, FP32_NORM),
        (torch.float16, FP32_NORM),
    ],
)
def test_the_norm_is_that_of_all_elements(dtype: torch.dtype, rtol: float) -> None:
    values = tensors(dtype)
    exact = math.sqrt(sum(float(value.double().square().sum()) for value in values))
    assert global_norm(values, SINGLE) == pytest.approx(exact, rel=rtol)


def test_dtypes_can_be_mixed_and_there_may_be_nothing() -> None:
    mixed = [torch.full((4,), 2.0), torch.full((4,), 3.0, dtype=torch.bfloat16)]
    assert global_norm(mixed, SINGLE) == pytest.approx(math.sqrt(52), rel=FP32_NORM)
    assert global_norm([], SINGLE) == 0.0
    assert count_zeros([]) == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_makes_the_norm_bad(bad: float) -> None:
    values = tensors(torch.float32)
    values[0][3, 5] = bad
    assert not math.isfinite(global_norm(values, SINGLE))


def test_zeros_are_counted() -> None:
    values = [torch.tensor([[0.0, 1.0], [0.0, -0.0]]), torch.tensor([2.0, 0.0])]
    assert count_zeros(values) == 4


def test_one_process_counts_everything_and_its_parameters_norm_is_known() -> None:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 1.0)
    pairs = list(module.named_parameters())
    assert owned_by_this_rank(pairs, SINGLE) == (True, True)
    assert parameters_norm(pairs, SINGLE) == pytest.approx(math.sqrt(26), rel=FP32_NORM)


def test_clip_factor_leaves_small_norms_alone_and_zero_means_no_limit() -> None:
    small, large, huge = torch.tensor([0.5, 4.0, 1e9], dtype=torch.float64)
    assert clip_factor(small, 1.0) == 1.0
    assert clip_factor(huge, 0.0) == 1.0
    assert clip_factor(large, 1.0) == 1.0 / (4.0 + 1e-6)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_clipping_equals_torchs(norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
    parameter.grad = torch.tensor(norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    factor = float(clip_factor(torch.tensor(norm, dtype=torch.float64), limit))
    assert norm * factor == pytest.approx(float(parameter.grad), rel=FP64_NORM)
