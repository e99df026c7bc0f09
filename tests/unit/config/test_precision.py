"""Which numbers a model computes in: what follows from the switches, and what is refused."""

from typing import Any

import pytest
import torch

from megatron.config.fields import FieldsError
from megatron.config.precision import Precision, PrecisionConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("switches", "precision", "gradient"),
    [
        ({}, Precision.FP32, Precision.FP32),
        ({"bf16": True}, Precision.BF16, Precision.FP32),
        ({"fp16": True}, Precision.FP16, Precision.FP32),
        ({"fp64": True}, Precision.FP64, Precision.FP64),
        (
            {"bf16": True, "accumulate_allreduce_grads_in_fp32": False},
            Precision.BF16,
            Precision.BF16,
        ),
    ],
)
def test_switches_choose_dtypes(
    switches: dict[str, Any], precision: Precision, gradient: Precision
) -> None:
    config = PrecisionConfig(**switches)
    assert config.precision is precision
    assert config.gradient_precision is gradient


def test_only_sixteen_bit_numbers_are_half() -> None:
    assert {kind for kind in Precision if kind.is_half} == {Precision.BF16, Precision.FP16}


def test_more_than_one_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than one precision was asked for") as caught:
        PrecisionConfig(fp16=True, bf16=True)
    assert caught.value.found == "--fp16 --bf16"


def test_an_fp32_residual_needs_a_half_precision_model() -> None:
    with pytest.raises(ConfigError, match="an fp32 residual stream needs a half-precision model"):
        PrecisionConfig(fp32_residual_connection=True)
    assert PrecisionConfig(fp32_residual_connection=True, bf16=True).fp32_residual_connection


@pytest.mark.parametrize(
    "name", ["initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"]
)
def test_loss_scaling_needs_positive_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match="loss scaling needs it positive") as caught:
        PrecisionConfig(**{name: 0})
    assert caught.value.found == f"--{name.replace('_', '-')} 0"


def test_a_constant_loss_scale_is_positive() -> None:
    with pytest.raises(ConfigError, match="the loss scale is not positive"):
        PrecisionConfig(fp16=True, loss_scale=0.0)


def test_all_that_is_wrong_is_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        PrecisionConfig(fp16=True, bf16=True, hysteresis=0)
    assert len(caught.value.errors) == 2


def test_the_bytes_of_an_element_are_torch_s() -> None:
    for precision in Precision:
        assert precision.num_bytes == getattr(torch, precision.value).itemsize
