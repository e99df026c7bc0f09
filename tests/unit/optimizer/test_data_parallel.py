"""Tests of megatron.optimizer.data_parallel; those with several ranks are in tests/distributed."""

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext
from megatron.optimizer.data_parallel import DistributedDataParallel

REPLICAS = ParallelContext.single().replicas


def test_the_wrapper_runs_its_module_and_collects_its_gradients() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2), REPLICAS)
    inputs = torch.randn(4, 3)
    assert torch.equal(ddp(inputs), ddp.module(inputs))
    ddp(inputs).sum().backward()
    ddp.finish()
    ddp.check_replicas_agree()
    assert ddp.module.weight.main_grad.any()
    ddp.zero_grad()
    assert not ddp.module.weight.main_grad.any()
    assert ddp.module.weight.grad is None


def test_gradients_of_half_precision_are_kept_in_the_dtype_asked_for() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ddp = DistributedDataParallel(nn.Linear(3, 2).bfloat16(), REPLICAS, gradient_dtype=dtype)
        assert ddp.module.weight.main_grad.dtype == dtype


def test_parameters_may_not_be_left_out_of_the_loss() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2), REPLICAS)
    with pytest.raises(ConfigError, match="no part in the backward"):
        ddp.finish()
