"""The parallel groups by DeepSpeed's names."""

from dataclasses import replace

import torch
from torch.nn import Parameter

from megatron.engine.deepspeed.grid import DeepSpeedGrid, mark_tensor_parallel
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import Init, Partition, set_parameter_metadata
from megatron.mpu.topology import Topology


def test_a_rank_is_where_its_context_says() -> None:
    # Rank 5 of tp 2 x dp 2 x pp 2: the second stage, the first replica, the second part of layers.
    context = replace(
        ParallelContext.single(),
        topology=Topology(tp=2, pp=2, dp=2),
        world=Group(tuple(range(8)), 5),
        tp=Group((4, 5), 1),
        pp=Group((1, 5), 1),
        dp=Group((5, 7), 0),
        model=Group((0, 1, 4, 5), 3),
    )
    grid = DeepSpeedGrid(context)
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (3, 4)
    assert grid.get_tensor_model_parallel_rank() == 1
    assert grid.get_tensor_model_parallel_world_size() == 2
    assert grid.get_tensor_model_parallel_src_rank() == 4
    assert grid.get_pipeline_model_parallel_rank() == 1
    assert grid.get_pipeline_model_parallel_world_size() == 2
    assert (grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()) == (0, 2)
    assert grid.get_data_parallel_group_ranks() == (5, 7)
    handles = (
        grid.get_model_parallel_group(),
        grid.get_tensor_model_parallel_group(),
        grid.get_pipeline_model_parallel_group(),
        grid.get_data_parallel_group(),
    )
    assert handles == (None,) * 4
    # By these DeepSpeed would take it for another kind of object.
    assert not hasattr(grid, "initialize_sequence_parallel")
    assert not hasattr(grid, "get_sequence_parallel_group")


def test_what_is_split_is_marked() -> None:
    split, whole = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    set_parameter_metadata(split, init=Init("zeros"), partition=Partition())
    set_parameter_metadata(whole, init=Init("zeros"))
    mark_tensor_parallel([split, whole])
    assert (split.tensor_model_parallel, whole.tensor_model_parallel) == (True, False)  # type: ignore[attr-defined]
