"""Tests that mappings over one rank are the identity, gradients included."""

import torch

from megatron.mpu import mappings
from megatron.mpu.context import ParallelContext


def test_every_mapping_is_the_identity_on_a_group_of_one() -> None:
    tensor = torch.ones(2, 2, requires_grad=True)
    for function in (
        mappings.copy_to_tp,
        mappings.reduce_from_tp,
        mappings.scatter_to_tp,
        mappings.gather_from_tp,
        mappings.gather_from_sequence,
        mappings.reduce_scatter_to_sequence,
    ):
        assert function(tensor, ParallelContext.single().tp) is tensor
