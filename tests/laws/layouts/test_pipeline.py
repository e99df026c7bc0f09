"""The layout law for pipelines: every schedule on every grid trains what one process trains.

Also where one schedule has to give the bits of another, where sequences differ in length between
micro-batches, and where stages are of unequal length.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.engine.base import BatchOptions, MicroBatch, PretrainTask, RawBatch
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train,
    train_all,
    whole,
    write_tiny_corpus,
)

# Three micro-batches on two stages: no multiple. Four layers: two stages of two chunks.
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "global_batch_size": 12,
    "train_iters": 3,
    "eval_iters": 1,
    "eval_interval": 3,
    "decoupled_lr": 0.02,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
    "gpipe": {"pipeline_schedule": "gpipe", "overlap_p2p_communication": True},
    "interleaved": {
        "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_p2p_communication": True,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "sgd, recompute": {"optimizer": "sgd", "lr": 0.05, "recompute_granularity": "full"},
}
WIDE = ((2, 2, 1), (1, 2, 2), (1, 4, 1))  # tp, pp, dp


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def run_of(corpus: str, grid: tuple[int, int, int], *flags: dict[str, Any]) -> RunConfig:
    tp, pp, dp = grid
    merged: dict[str, Any] = {}
    for each in flags:
        merged |= each
    return tiny_run(
        corpus,
        **SHAPE,
        **merged,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        micro_batch_size=4 // dp,
    )


def check_equal(records: Sequence[Record], alone: Record, tolerance: float = FP64) -> None:
    for record in records:  # every rank has the same numbers
        assert (record.losses, record.grad_norms) == (records[0].losses, records[0].grad_norms)
        assert record.evaluations == records[0].evaluations
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    assert_all_close(whole(records), whole([alone]), tolerance)
    assert_close(
        [each.mean for each in records[0].evaluations],
        [each.mean for each in alone.evaluations],
        tolerance,
    )


def same_bits(one: Record, other: Record) -> bool:
    return (one.losses, one.grad_norms) == (other.losses, other.grad_norms) and all(
        torch.equal(actual, reference)
        for name in one.state
        for (_, actual), (_, reference) in zip(one.state[name].pieces, other.state[name].pieces)
    )


MODELS_IN_STAGES = ("gpt2", "llama", "ragged")
# The others are in the wide suite: the matrix has every schedule beside every way to recompute and
# every part of these models, and bits are compared here with one variant as with another.
TAKEN = (("gpt2", "adamw"), ("ragged", "adamw"))
TURNS = [
    pytest.param(*turn, marks=[] if turn in TAKEN else [pytest.mark.wide])
    for turn in itertools.product(MODELS_IN_STAGES, VARIANTS)
]


@pytest.mark.parametrize(("model", "variant"), TURNS)
def test_every_schedule_trains_the_same_model(corpus: str, model: str, variant: str) -> None:
    flags = {**MODELS[model], **VARIANTS[variant]}
    ((alone,),) = run_on_ranks(1, train_all, [run_of(corpus, (1, 1, 1), flags)])
    assert max(alone.grad_norms) > 0.5, "clipping is meant to be active"
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    configs = [run_of(corpus, (1, 2, 1), flags, each) for each in SCHEDULES.values()]
    by_rank = run_on_ranks(2, train_all, configs)
    for at in range(len(SCHEDULES)):
        check_equal([records[at] for records in by_rank], alone)
    for one_f_one_b, zero_bubble, gpipe, _ in by_rank:
        assert same_bits(one_f_one_b, zero_bubble)
        assert same_bits(one_f_one_b, gpipe)
    # On four ranks each grid takes another schedule for each model and variant.
    turn = MODELS_IN_STAGES.index(model) + 2 * list(VARIANTS).index(variant)
    names = [list(SCHEDULES)[(turn + 2 * at) % 4] for at in range(len(WIDE))]
    names[-1] = names[-1] if names[-1] != "interleaved" else "1f1b"  # too few layers for that
    wide = [run_of(corpus, grid, flags, SCHEDULES[name]) for grid, name in zip(WIDE, names)]
    by_rank = run_on_ranks(4, train_all, wide)
    for at in range(len(WIDE)):
        check_equal([records[at] for records in by_rank], alone)


def test_half_precision_stays_in_its_band_and_schedules_have_the_same_bits(corpus: str) -> None:
    flags = {"fp64": False, "bf16": True, **VARIANTS["adamw"]}
    ((alone,),) = run_on_ranks(1, train_all, [run_of(corpus, (1, 1, 1), flags)])
    names = ("1f1b", "zero-bubble")
    configs = [run_of(corpus, (1, 2, 1), flags, SCHEDULES[name]) for name in names]
    for one_f_one_b, zero_bubble in run_on_ranks(2, train_all, configs):
        assert same_bits(one_f_one_b, zero_bubble)
        assert_close(one_f_one_b.losses, alone.losses, BF16)


def test_stages_may_be_of_unequal_length(corpus: str) -> None:
    ((alone,),) = run_on_ranks(1, train_all, [run_of(corpus, (1, 1, 1))])
    uneven: list[dict[str, Any]] = [
        {"pipeline_layer_counts": (3, 1)},
        {"pipeline_balance": "parameters"},
        {"decoder_first_pipeline_num_layers": 1},
        {"pipeline_layer_counts": (1, 1, 1, 1), **SCHEDULES["interleaved"]},
        {"num_layers_per_virtual_pipeline_stage": 1},
    ]
    by_rank = run_on_ranks(2, train_all, [run_of(corpus, (1, 2, 1), each) for each in uneven])
    for at, blocks in enumerate(([3, 1], [2, 2], [1, 3], [2, 2], [2, 2])):
        records = [records[at] for records in by_rank]
        check_equal(records, alone)
        assert [_num_blocks(record) for record in records] == blocks


def _num_blocks(record: Record) -> int:
    names = {name.split("/", 1)[1] for name in record.state if name.startswith("model/")}
    return len({name.split(".")[1] for name in names if name.startswith("layers.")})


def shortened() -> PretrainTask:
    """GPT on sequences that end, for each micro-batch, at its first token."""
    task = gpt_task()
    inner: Callable[[RawBatch, BatchOptions], MicroBatch] = task.batch

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        inputs, labels = inner(raw, options)
        length = 4 + 3 * (int(inputs[0][0, 0]) % 4)
        return MicroBatch(
            tuple(tensor[:, :length] for tensor in inputs),
            tuple(tensor[:, :length] for tensor in labels),
        )

    return dataclasses.replace(task, batch=batch)


def train_shortened(configs: Sequence[RunConfig]) -> list[Record]:
    return [train(config, shortened()) for config in configs]


def test_sequences_may_differ_in_length_between_micro_batches(corpus: str) -> None:
    flags = {**MODELS["ragged"], "position_embedding_type": "rope"}
    ((alone,),) = run_on_ranks(1, train_shortened, [run_of(corpus, (1, 1, 1), flags)])
    configs = [run_of(corpus, (1, 2, 1), flags, each) for each in SCHEDULES.values()]
    by_rank = run_on_ranks(2, train_shortened, configs)
    for at in range(len(configs)):
        check_equal([records[at] for records in by_rank], alone)
