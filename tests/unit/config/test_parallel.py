"""How many ways a model is split: what is refused."""

from typing import Any

import pytest

from megatron.config.parallel import (
    ParallelConfig,
    PipelineBalance,
    PipelineSchedule,
    ShardingStrategy,
)
from megatron.errors import ConfigError


def test_nothing_is_split_unless_asked_for() -> None:
    config = ParallelConfig()
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (1, 1)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_parallel_size_is_positive(name: str, size: int) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match="a parallel size is not positive") as caught:
        ParallelConfig(**{name: size})
    assert caught.value.found == f"{flag} {size}"


@pytest.mark.parametrize(
    "name",
    [
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    ],
)
def test_a_number_of_layers_or_stages_is_positive(name: str) -> None:
    with pytest.raises(ConfigError, match="it is not positive"):
        ParallelConfig(**{name: 0})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {
                "num_virtual_stages_per_pipeline_rank": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
            },
            "the virtual pipeline stages are given twice",
        ),
        (
            {"pipeline_layer_counts": (2, 3), "decoder_last_pipeline_num_layers": 3},
            "the layers of a pipeline stage are given twice",
        ),
        (
            {
                "num_layers_per_virtual_pipeline_stage": 2,
                "decoder_first_pipeline_num_layers": 3,
            },
            "stages of unequal length cannot be cut into virtual stages of one length",
        ),
        (
            {"pipeline_balance": PipelineBalance.PARAMETERS, "pipeline_layer_costs": (1.0, 2.0)},
            "what stages are balanced by is given twice",
        ),
        (
            {"pipeline_balance": PipelineBalance.PARAMETERS, "pipeline_layer_counts": (2, 3)},
            "and what they are to be balanced by too",
        ),
        (
            {"pipeline_layer_costs": (1.0,), "num_layers_per_virtual_pipeline_stage": 2},
            "and what they are to be balanced by too",
        ),
    ],
)
def test_nothing_about_a_pipeline_is_said_twice(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**flags)


def test_parameters_are_gathered_by_the_distributed_optimizer_alone() -> None:
    with pytest.raises(ConfigError, match="gathered only where replicas share") as caught:
        ParallelConfig(overlap_param_gather=True)
    assert caught.value.found == "--overlap-param-gather without --use-distributed-optimizer"
    ParallelConfig(overlap_param_gather=True, use_distributed_optimizer=True)


def test_parts_travel_of_split_sequences_alone() -> None:
    with pytest.raises(ConfigError, match="only parts of split sequences travel") as caught:
        ParallelConfig(tp_comm_overlap=True)
    assert caught.value.found == "--tp-comm-overlap without --sequence-parallel"
    ParallelConfig(tp_comm_overlap=True, sequence_parallel=True)


def test_buckets_hold_something() -> None:
    with pytest.raises(ConfigError, match="buckets of gradients are empty") as caught:
        ParallelConfig(ddp_bucket_size=0)
    assert caught.value.found == "--ddp-bucket-size 0"


def test_ranks_compare_their_calls_when_asked_to_and_wait_a_moment() -> None:
    assert ParallelConfig().check_seconds is None
    assert ParallelConfig(check_collectives=True).check_seconds == 60.0
    with pytest.raises(ConfigError, match="for no time at all") as caught:
        ParallelConfig(check_collectives_seconds=0.0)
    assert caught.value.found == "--check-collectives-seconds 0.0"


def test_what_replicas_share_out_is_said_by_either_flag() -> None:
    assert ParallelConfig().sharding is ShardingStrategy.NO_SHARD
    assert ParallelConfig(use_distributed_optimizer=True).sharding is ShardingStrategy.OPTIM
    full = ShardingStrategy.OPTIM_GRADS_PARAMS
    for shared in (False, True):
        both = ParallelConfig(
            use_distributed_optimizer=shared, data_parallel_sharding_strategy=full
        )
        assert both.sharding is full
    taken = [
        (one.shards_state, one.shards_gradients, one.shards_parameters) for one in ShardingStrategy
    ]
    assert taken == [(False,) * 3, (True, False, False), (True, True, False), (True,) * 3]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "no_shard"},
            "nothing is",
        ),
        ({"reshard_after_forward": False}, "are whole all the time"),
        ({"num_distributed_optimizer_instances": 2}, "cannot do so in parts"),
        ({"num_distributed_optimizer_instances": 0}, "a parallel size is not positive"),
        (
            {
                "pipeline_schedule": PipelineSchedule.ZERO_BUBBLE,
                "data_parallel_sharding_strategy": "optim_grads",
            },
            "use --pipeline-schedule 1f1b, or --data-parallel-sharding-strategy optim",
        ),
    ],
)
def test_sharding_that_contradicts_other_flags_is_refused(
    flags: dict[str, Any], words: str
) -> None:
    if "data_parallel_sharding_strategy" in flags:
        strategy = ShardingStrategy(flags["data_parallel_sharding_strategy"])
        flags = flags | {"data_parallel_sharding_strategy": strategy}
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**flags)
