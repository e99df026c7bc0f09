"""Tests of megatron.optimizer.param_buffer in one process; gathers are in tests/distributed."""

import torch
from torch import nn

from megatron.mpu.context import Group, ParallelContext, ReplicaGroups
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.param_buffer import ParameterBuffer

SINGLE = ParallelContext.single()
FIRST_OF_TWO, SECOND_OF_TWO = Group((0, 1), 0), Group((0, 1), 1)


def buffer_of(module: nn.Module, group: Group) -> ParameterBuffer:
    replicas = ReplicaGroups.one(group)
    gradients = GradBuffer(module.named_parameters(), replicas, gradient_dtype=torch.float32)
    return ParameterBuffer(module, gradients.flats, overlap=False)


def test_parameters_keep_values_shapes_and_identity_in_one_storage_per_dtype() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    module[1].bfloat16()
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    buffer_of(module, SINGLE.dp)
    for name, parameter in module.named_parameters():
        known, values = before[name]
        assert parameter is known
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert torch.equal(parameter, values)
    pointers = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(pointers) == 2


def test_parameters_lie_at_the_places_of_their_gradients() -> None:
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    buffer_of(module, FIRST_OF_TWO)
    for parameter in module.parameters():
        assert parameter.storage_offset() == parameter.main_grad.storage_offset()


def test_two_ranks_own_each_element_once() -> None:
    ranges = []
    for group in (FIRST_OF_TWO, SECOND_OF_TWO):
        module = nn.Linear(30, 30)
        buffer = buffer_of(module, group)
        ranges.append([buffer.owned(parameter) for parameter in module.parameters()])
    # bias first in the buffer: 64 elements, then 900 of the weight; 1024 with padding
    assert ranges == [[(0, 448), (0, 30)], [(448, 900), (0, 0)]]


def test_a_lone_rank_owns_everything_and_gathers_nothing() -> None:
    module = nn.Linear(5, 7)
    buffer = buffer_of(module, SINGLE.dp)
    before = module.weight.detach().clone()
    buffer.gather()
    buffer.wait()
    assert torch.equal(module.weight, before)
    assert buffer.owned(module.weight) == (0, 35)
