"""Runs through DeepSpeed's pipeline, what they are compared with, and an engine without a run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.engine.deepspeed.pipeline import DeepSpeedPipelineEngine
from megatron.global_vars import Runtime
from megatron.launch import Launch, set_library_environment
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
)
from tests.unit.engine.engines import runtime_of

# Three micro-batches on two stages: no multiple. A key's bias has a gradient of nothing but
# rounding, which AdamW would blow up to the learning rate: epsilon keeps it small.
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "global_batch_size": 12,
    "train_iters": 3,
    "eval_iters": 1,
    "eval_interval": 3,
    "fp64": False,
    "adam_eps": 1e-4,
}
ADAMW: dict[str, Any] = {"weight_decay": 0.1}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full"}
# DeepSpeed makes room for whole buckets; its 500 million elements are for other models.
BUCKETS: dict[str, Any] = {
    "zero_reduce_bucket_size": 100_000,
    "zero_allgather_bucket_size": 100_000,
}
DEADLINE_S = 240.0

Grid = tuple[int, int, int]  # tp, pp, dp
ALONE: Grid = (1, 1, 1)


def native(corpus: str, grid: Grid, *flags: dict[str, Any]) -> RunConfig:
    tp, pp, dp = grid
    merged: dict[str, Any] = {"micro_batch_size": 4 // dp if 4 % dp == 0 else 1}
    for each in (SHAPE, *flags):
        merged |= each
    return tiny_run(
        corpus,
        **merged,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )


def piped(corpus: str, grid: Grid, stage: int, *flags: dict[str, Any]) -> RunConfig:
    ours = {"deepspeed": True, "zero_stage": str(stage), **BUCKETS}
    return native(corpus, grid, *flags, ours)


def run_alone(configs: Sequence[RunConfig]) -> list[Record]:
    (records,) = run_on_ranks(1, train_all, list(configs), timeout_s=DEADLINE_S)
    return records


def run_piped(size: int, configs: Sequence[RunConfig]) -> list[list[Record]]:
    """For each of the runs the records of all ranks."""
    by_rank = run_on_ranks(size, train_all, list(configs), timeout_s=DEADLINE_S, deepspeed=True)
    return [[records[at] for records in by_rank] for at in range(len(configs))]


def check_equal(records: Sequence[Record], alone: Record, tolerance: float = FP32) -> None:
    for record in records:  # every rank has the same numbers
        assert repr(record.steps) == repr(records[0].steps)  # a norm may be nan
        assert record.evaluations == records[0].evaluations
        assert record.scalars == alone.scalars
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    assert_close(
        [each.mean for each in records[0].evaluations],
        [each.mean for each in alone.evaluations],
        tolerance,
    )
    assert [e.tokens for e in records[0].evaluations] == [e.tokens for e in alone.evaluations]
    if tolerance == FP32:
        assert_all_close(whole(records), whole([alone]), tolerance)


def same_bits(one: Record, other: Record) -> bool:
    return one.steps == other.steps and all(
        torch.equal(actual, reference)
        for name in one.state
        for (_, actual), (_, reference) in zip(one.state[name].pieces, other.state[name].pieces)
    )


def engine_of(config: RunConfig) -> DeepSpeedPipelineEngine:
    set_library_environment(Launch(rank=dist.get_rank(), world_size=dist.get_world_size()))
    context = ParallelContext.build(
        Topology.fill(
            dist.get_world_size(),
            tp=config.parallel.tensor_model_parallel_size,
            pp=config.parallel.pipeline_model_parallel_size,
        )
    )
    runtime: Runtime = dataclasses.replace(runtime_of(config), context=context)
    return DeepSpeedPipelineEngine(
        config, gpt_task(), model_build(runtime), runtime.tokenizer, runtime.timers
    )
