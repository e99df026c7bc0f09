"""The laws for retrievers: layouts, engines and resumed runs train one model.

A question is compared with the blocks of a micro-batch on all replicas: layouts with as many blocks
train the same model.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.config.run import RunConfig
from megatron.model.retrieval import loss as retrieval_loss
from tests.laws.checkpoints.test_resume import FULL, HALF, check_joined
from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP32, FP64, Record, assert_all_close, assert_close, whole
from tests.support.tiny_bert import (
    TinyBlocks,
    tiny_retrieval_run,
    train_retrieval_all,
    write_tiny_blocks,
)

# A bias that all blocks share changes no loss: AdamW would make steps of its gradient's rounding.
SHAPE: dict[str, Any] = {
    "optimizer": "sgd",
    "lr": 0.05,
    "micro_batch_size": 8,
    "eval_iters": 1,
    "eval_interval": 3,
    "hidden_dropout": 0.1,
    "retriever_report_topk_accuracies": (1, 5),
}
SHARED = {"biencoder_shared_query_context_model": True}
KINDS: dict[str, dict[str, Any]] = {
    "two towers": {"biencoder_projection_dim": 12, "retriever_score_scaling": True},
    "one tower": SHARED,
    "one tower, projected": {**SHARED, "biencoder_projection_dim": 12},
}
TP, PP, CP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
SP = {TP: 2, "sequence_parallel": True}
# World size: what each run of it adds to the flags of one process; all compare eight blocks.
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"micro_batch_size": 4},
        {**SP},
        {PP: 2},
        {CP: 2, "cp_comm_type": "p2p"},
    ],
    4: [
        {TP: 2, "micro_batch_size": 4, "data_parallel_sharding_strategy": "optim_grads_params"},
        {PP: 2, "micro_batch_size": 4, "recompute_granularity": "full"},
    ],
}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> TinyBlocks:
    return write_tiny_blocks(Path(tmp_path_factory.mktemp("blocks")))


def check_equal(records: list[Record], alone: Record, tolerance: float) -> None:
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    for ours, expected in zip(records[0].evaluations, alone.evaluations, strict=True):
        assert_close(ours.means, expected.means, tolerance)
        assert ours.metrics == expected.metrics
    state = {name: t for name, t in whole(records).items() if name.startswith("model/")}
    assert_all_close(state, whole([alone], prefix="model/"), tolerance)


@pytest.mark.parametrize(
    "kind",
    ["two towers", "one tower", pytest.param("one tower, projected", marks=pytest.mark.wide)],
)
def test_every_layout_trains_the_same_model(blocks: TinyBlocks, kind: str) -> None:
    flags = SHAPE | KINDS[kind]
    ((alone,),) = run_on_ranks(1, train_retrieval_all, [tiny_retrieval_run(blocks, **flags)])
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    for world_size, grids in GRIDS.items():
        runs = [tiny_retrieval_run(blocks, **(flags | grid)) for grid in grids]
        by_rank = run_on_ranks(world_size, train_retrieval_all, runs)
        for at in range(len(grids)):
            check_equal([ranks[at] for ranks in by_rank], alone, FP64)


def test_blocks_are_those_of_a_micro_batch_on_all_replicas(blocks: TinyBlocks) -> None:
    """Four blocks at a time: two micro-batches alone, and of two replicas."""
    runs = [tiny_retrieval_run(blocks, **(SHAPE | {"micro_batch_size": size})) for size in (4, 8)]
    ((four, eight),) = run_on_ranks(1, train_retrieval_all, runs)
    assert four.losses[0] < eight.losses[0], "fewer blocks are easier"
    run = tiny_retrieval_run(blocks, **(SHAPE | {"micro_batch_size": 2}))
    by_rank = run_on_ranks(2, train_retrieval_all, [run])
    check_equal([ranks[0] for ranks in by_rank], four, FP64)


@pytest.mark.parametrize(
    "grid",
    [
        {"zero_stage": "3", "micro_batch_size": 4},
        pytest.param({"zero_stage": "1", PP: 2}, marks=pytest.mark.wide),
    ],
)
def test_both_engines_train_the_same_model(blocks: TinyBlocks, grid: dict[str, Any]) -> None:
    flags = SHAPE | KINDS["two towers"] | {"fp64": False}
    ((alone,),) = run_on_ranks(1, train_retrieval_all, [tiny_retrieval_run(blocks, **flags)])
    run = tiny_retrieval_run(blocks, deepspeed=True, **(flags | grid))
    by_rank = run_on_ranks(2, train_retrieval_all, [run], deepspeed=True)
    check_equal([ranks[0] for ranks in by_rank], alone, FP32)


def test_a_resumed_run_is_the_uninterrupted_run(blocks: TinyBlocks, tmp_path: Path) -> None:
    flags = SHAPE | {"fp64": False, "optimizer": "adam", "train_iters": FULL, "split": "60,20,20"}
    plain: RunConfig = tiny_retrieval_run(blocks, **flags)
    kept = str(tmp_path / "checkpoints")
    checkpoint = dataclasses.replace(plain.checkpoint, save=kept, load=kept)
    stopping = dataclasses.replace(plain.training, exit_interval=HALF)
    saving = dataclasses.replace(plain, checkpoint=checkpoint, training=stopping)
    loading = dataclasses.replace(plain, checkpoint=checkpoint)
    straight, first = run_on_ranks(1, train_retrieval_all, [plain, saving])[0]
    (second,) = run_on_ranks(1, train_retrieval_all, [loading])[0]
    check_joined(straight, first, second, "retrieval")


def train_without_gradients_of_others(configs: list[RunConfig]) -> list[Record]:
    real = retrieval_loss.gather_from_sequence

    def gather(own: Any, group: Any) -> Any:
        gathered = real(own, group).detach().clone()
        gathered[group.rank * len(own) : (group.rank + 1) * len(own)] = own
        return gathered

    with patch.object(retrieval_loss, "gather_from_sequence", gather):
        return train_retrieval_all(configs)


def test_blocks_without_the_gradients_of_other_replicas_are_seen(blocks: TinyBlocks) -> None:
    runs = [tiny_retrieval_run(blocks, **(SHAPE | {"micro_batch_size": size})) for size in (8, 4)]
    ((alone,),) = run_on_ranks(1, train_retrieval_all, runs[:1])
    by_rank = run_on_ranks(2, train_without_gradients_of_others, runs[1:])
    with pytest.raises(AssertionError, match="apart"):
        check_equal([ranks[0] for ranks in by_rank], alone, FP64)
