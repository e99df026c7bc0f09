"""The MLP's order of halves and its activations."""

import pytest
import torch

from megatron.config.model import Activation, GluActivation
from megatron.model.mlp import ACTIVATIONS, MLP
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import partition_of
from tests.support.models import roughen, tiny_build, tiny_config


def test_every_activation_of_the_config_is_there() -> None:
    assert set(ACTIVATIONS) == set(Activation)


def test_the_gate_is_the_first_half() -> None:
    mlp = MLP(tiny_config(glu_activation=GluActivation.REGLU, ffn_hidden_size=8), tiny_build())
    roughen(mlp, ParallelContext.single())
    with torch.no_grad():
        mlp.fc1.weight[:8] = 0  # gate = -1 everywhere, which ReLU closes
        mlp.fc1.bias[:8] = -1
    hidden = torch.randn(3, 2, 16, dtype=torch.float64)
    assert torch.equal(mlp(hidden), mlp.fc2.bias.expand(3, 2, 16))


@pytest.mark.parametrize("glu", [None, GluActivation.SWIGLU])
def test_a_gated_matrix_is_split_as_two_blocks(glu: GluActivation | None) -> None:
    mlp = MLP(tiny_config(glu_activation=glu), tiny_build())
    partition = partition_of(mlp.fc1.weight)
    assert partition is not None
    assert partition.blocks == (1 if glu is None else 2)
    assert mlp.fc1.weight.shape[0] == 64 * partition.blocks
