"""Tests of mappings in one process: the identity on a group of one, and who holds which tokens."""

import pytest
import torch

from megatron.errors import ConfigError
from megatron.mpu import mappings
from megatron.mpu.context import Group, ParallelContext


def test_every_mapping_is_the_identity_on_a_group_of_one() -> None:
    tensor = torch.ones(2, 2, requires_grad=True)
    for function in (
        mappings.copy_to_tp,
        mappings.reduce_from_tp,
        mappings.gather_from_sequence,
        mappings.reduce_scatter_to_sequence,
    ):
        assert function(tensor, ParallelContext.single().tp) is tensor


def test_parts_of_a_sequence_are_equal_and_in_order() -> None:
    parts = [mappings.sequence_part(6, Group((4, 5, 6), rank)) for rank in range(3)]
    assert [token for part in parts for token in range(6)[part]] == list(range(6))
    assert {len(range(6)[part]) for part in parts} == {2}


@pytest.mark.parametrize(("length", "fix"), [(7, "such as 8"), (1, "such as 2")])
def test_a_sequence_that_leaves_a_rest_is_refused(length: int, fix: str) -> None:
    two = Group((0, 1), 1)
    with pytest.raises(ConfigError, match="cannot be shared out evenly") as caught:
        mappings.reduce_scatter_to_sequence(torch.ones(length, 2), two)
    assert f"{length} tokens over 2 ranks under --sequence-parallel" in str(caught.value)
    assert fix in str(caught.value)
