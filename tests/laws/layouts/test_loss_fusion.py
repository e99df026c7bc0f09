"""A loss that makes its own logits, a few tokens at a time, trains the same model as one of logits.

Whole runs by `pretrain()` in float64, with --cross-entropy-loss-fusion and without it at the same
layout; everywhere else in the laws it is on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.config.run import RunConfig
from megatron.mpu import linear_cross_entropy
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

TIED, UNTIED, MASKED = MODELS["gpt2"], MODELS["llama"], MODELS["ragged"]
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
OVERLAPPED: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 1000,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, sequences split": {**MASKED, **TP, "sequence_parallel": True},
    "pp 2, tied over two stages": {**TIED, **PP},
    "pp 2, deferred gradients of weights": {**UNTIED, **PP, "pipeline_schedule": "zero-bubble"},
    "dp 2, gathered while it is used": {**UNTIED, **OVERLAPPED},
    "dp 2, samples that grow": {
        **MASKED,
        "curriculum_schedule": "fixed_discrete",
        "curriculum_seqlens": (8, 16),
        "curriculum_seqlens_until": (1,),
    },
}
TOKENS_OF_CHUNK = 5  # of 16 or 32 in a micro-batch


class Trained(NamedTuple):
    """The record of a run on one rank, and the number of chunks of each of its fused losses."""

    record: Record
    chunks: list[int]


def train_in_small_chunks(configs: Sequence[RunConfig]) -> list[Trained]:
    """A body for `run_on_ranks`: train with several chunks in each micro-batch."""
    inner, chunks = linear_cross_entropy.chunk_rows, list[int]()

    def noted(rows: int, weight: Sequence[int], itemsize: int, kind: str, *, has_sum: bool) -> int:
        linear_cross_entropy._CHUNK_BYTES["cpu"] = TOKENS_OF_CHUNK * weight[0] * itemsize
        size = inner(rows, weight, itemsize, kind, has_sum=has_sum)
        chunks.append(-(-rows // size))
        return size

    linear_cross_entropy.chunk_rows = noted
    trained = []
    for config in configs:
        chunks.clear()
        (record,) = train_all([config])
        trained.append(Trained(record, [*chunks]))
    return trained


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def both(corpus: str, flags: dict[str, Any]) -> list[RunConfig]:
    sizes = {"micro_batch_size": 2, "train_iters": 2, "eval_iters": 1, "eval_interval": 2}
    return [
        tiny_run(corpus, **sizes, **flags, cross_entropy_loss_fusion=fused)
        for fused in (True, False)
    ]


def check_equal(fused: Sequence[Record], unfused: Sequence[Record]) -> None:
    for one, other in zip(fused, unfused, strict=True):
        assert_close(one.losses, other.losses, FP64)
        assert_close(one.grad_norms, other.grad_norms, FP64)
        evaluated = [[found.mean for found in record.evaluations] for record in (one, other)]
        assert_close(*evaluated, FP64)
        assert len(set(one.losses)) == len(one.losses), "the weights are meant to move"
    assert_all_close(whole(fused, prefix="model/"), whole(unfused, prefix="model/"), FP64)


def test_a_fused_loss_trains_the_same_model(corpus: str) -> None:
    configs = [config for flags in LAYOUTS.values() for config in both(corpus, flags)]
    by_rank = run_on_ranks(2, train_in_small_chunks, configs, timeout_s=120)
    for at, name in enumerate(LAYOUTS):
        fused, unfused = ([rank[2 * at + i] for rank in by_rank] for i in (0, 1))
        try:
            check_equal([one.record for one in fused], [one.record for one in unfused])
            # The last rank has the last stage.
            assert min(fused[-1].chunks) > 1
            assert not unfused[-1].chunks
        except AssertionError as error:
            error.add_note(f"layout: {name}")
            raise
