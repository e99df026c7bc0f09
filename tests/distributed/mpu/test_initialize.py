"""Tests of Megatron's accessor names over real groups."""

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.errors import ConfigError, NotInitialisedError
from tests.support.ranks import run_on_ranks


def accessors_agree_with_the_grid() -> dict[str, object]:
    mpu.initialize_model_parallel(2, 2)
    names = [
        *(
            f"get_{axis}_{what}"
            for axis in (
                "tensor_model_parallel",
                "pipeline_model_parallel",
                "data_parallel",
                "model_parallel",
            )
            for what in ("rank", "world_size")
        ),
        "get_tensor_model_parallel_src_rank",
        "get_data_parallel_src_rank",
        "get_pipeline_model_parallel_first_rank",
        "get_pipeline_model_parallel_last_rank",
        "get_pipeline_model_parallel_next_rank",
        "get_pipeline_model_parallel_prev_rank",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "model_parallel_is_initialized",
    ]
    found = {name: getattr(mpu, name)() for name in names}
    for name in ("tensor_model", "pipeline_model", "data", "model"):
        handle = getattr(mpu, f"get_{name}_parallel_group")()
        assert dist.get_world_size(handle) == found[f"get_{name}_parallel_world_size"]
    assert mpu.get_parallel_context().rank == dist.get_rank()
    return found


def test_accessors_agree_with_the_grid() -> None:
    last = run_on_ranks(8, accessors_agree_with_the_grid)[7]
    assert last == {
        "get_tensor_model_parallel_rank": 1,
        "get_tensor_model_parallel_world_size": 2,
        "get_pipeline_model_parallel_rank": 1,
        "get_pipeline_model_parallel_world_size": 2,
        "get_data_parallel_rank": 1,
        "get_data_parallel_world_size": 2,
        "get_model_parallel_rank": 3,
        "get_model_parallel_world_size": 4,
        "get_tensor_model_parallel_src_rank": 6,
        "get_data_parallel_src_rank": 5,
        "get_pipeline_model_parallel_first_rank": 3,
        "get_pipeline_model_parallel_last_rank": 7,
        "get_pipeline_model_parallel_next_rank": 3,
        "get_pipeline_model_parallel_prev_rank": 3,
        "is_pipeline_first_stage": False,
        "is_pipeline_last_stage": True,
        "model_parallel_is_initialized": True,
    }


def a_second_initialise_names_the_first() -> None:
    mpu.initialize_model_parallel(2, 1)
    with pytest.raises(NotInitialisedError, match="already initialised") as caught:
        mpu.initialize_model_parallel(1, 1)
    assert "test_initialize.py:" in str(caught.value.found)


def it_can_be_initialised_again_after_destroying() -> None:
    for tensor_size in (2, 1, 2):
        mpu.initialize_model_parallel(tensor_size, 1)
        assert mpu.get_tensor_model_parallel_world_size() == tensor_size
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mpu.get_tensor_model_parallel_group())
        assert ones.item() == tensor_size
        # A group of one: None here would sum over both ranks.
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mpu.get_data_parallel_group())
        assert ones.item() == 2 // tensor_size
        mpu.destroy_model_parallel()
        assert not mpu.model_parallel_is_initialized()
    dist.barrier()  # the world is still there


def sizes_that_do_not_fit_are_refused_and_leave_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="do not divide into whole model replicas"):
        mpu.initialize_model_parallel(4, 1)
    assert not mpu.model_parallel_is_initialized()
    mpu.initialize_model_parallel(2, 1)


@pytest.mark.parametrize(
    "body",
    [
        a_second_initialise_names_the_first,
        it_can_be_initialised_again_after_destroying,
        sizes_that_do_not_fit_are_refused_and_leave_nothing_behind,
    ],
)
def test_initialising_twice_or_wrongly(body: object) -> None:
    run_on_ranks(2, body)
