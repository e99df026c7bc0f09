"""Local tensors as boxes of whole ones: tiling, padding, flat ranges, writable views."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import tiling_fault
from megatron.checkpoint.sharded import Placement, ShardedTensor, Snapshot, by_name
from megatron.errors import CheckpointError
from megatron.mpu.partition import Partition, local_slice
from tests.unit.checkpoint.toy import WEIGHTS, rank_at


@pytest.mark.parametrize("tp", [1, 2, 4])  # all dimensions of the toy divide by these
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_all_ranks_together_hold_every_element_of_every_tensor(tp, dp):
    held = {}
    for rank in range(tp * dp):
        for tensor in rank_at(tp, dp, rank).tensors:
            for part in tensor.parts:
                held.setdefault(tensor.name, {})[part.box] = part.view
                assert part.view.shape == part.box.shape
    for name, weight in WEIGHTS.items():
        for prefix in ("model/", "optimizer/exp_avg/"):
            assert tiling_fault(list(held[prefix + name]), weight.shape) is None


@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([Partition(dim=0), Partition(dim=1), Partition(dim=0, blocks=2), None]),
    st.data(),
)
def test_a_flat_range_of_a_shard_lands_where_its_values_belong(size, partition, data):
    full = torch.arange(12 * 6.0).reshape(12, 6)
    index = data.draw(st.integers(0, size - 1))
    local = local_slice(full, partition, index, size).contiguous()
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    tensor = ShardedTensor.of_range(
        "w",
        local.reshape(-1)[start:stop].clone(),
        start=start,
        local_shape=local.shape,
        placement=Placement(partition, index, size),
    )
    assert tensor.global_shape == (12, 6)
    for box, view in tensor.parts:
        assert torch.equal(view, full[box.slices])
    assert sum(box.size for box in tensor.boxes) == stop - start


def test_padding_rows_are_outside_the_whole_tensor_and_can_be_zeroed():
    local = torch.ones(4, 2)  # rows 4..8 of 8, of which 5 are true
    tensor = ShardedTensor.of("w", local, Placement(Partition(dim=0), 1, 2, true_rows=5))
    assert tensor.global_shape == (5, 2)
    assert [(box.offset, box.shape) for box in tensor.boxes] == [((4, 0), (1, 2))]
    tensor.zero_padding()
    assert local.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_a_rank_with_nothing_but_padding_holds_no_box():
    tensor = ShardedTensor.of("w", torch.ones(4, 2), Placement(Partition(dim=0), 1, 2, true_rows=3))
    assert tensor.boxes == ()
    assert tensor.global_shape == (3, 2)
    assert tensor.padding[0].shape == (4, 2)


def test_parts_are_views_of_the_parameter_without_its_gradient():
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    ShardedTensor.of("w", parameter).parts[0].view.fill_(1)
    assert bool((parameter == 1).all())


def test_two_tensors_of_one_name_are_refused():
    tensor = ShardedTensor.of("w", torch.zeros(2))
    with pytest.raises(CheckpointError, match="same name"):
        by_name([tensor, tensor])
    with pytest.raises(CheckpointError, match="same name"):
        Snapshot((tensor, tensor), progress={}, config={}).by_name()
