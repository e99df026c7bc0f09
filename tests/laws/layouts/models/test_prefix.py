"""The laws for prefix LMs: layouts, engines and resumed runs train one model.

Prefixes cross every border that a layout draws: between tensor-parallel ranks, stages, and the
parts of a sequence that ranks share, where attention has a mask (p2p) or blocks (a2a).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.model import attention
from megatron.model.specs import Carry
from megatron.ops import prefix_attention
from pretrain_prefix_lm import prefix_lm_task
from tests.laws.checkpoints.test_resume import FULL, check_resumed
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train,
    train_prefix_all,
    whole,
    write_tiny_corpus,
)
from tests.unit.data.dialogues import as_pairs, random_dialogues, write_pairs

SHAPE: dict[str, Any] = {"num_layers": 4, "eval_iters": 1, "eval_interval": 3}
WEIGHED = {"loss_on_targets_only": True, "reweight_loss_based_on_position_frequency": True}
BY_DOCUMENT = {"reset_attention_mask": True, "reset_position_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "a prefix a row": WEIGHED,
    "a prefix a document": {**MODELS["llama"], **BY_DOCUMENT, "loss_on_targets_only": True},
    "pairs": {"mtf": True, "position_embedding_type": "rope"},
    "alibi, a loss of all tokens": {**MODELS["bloom"], **BY_DOCUMENT, "eod_mask_loss": True},
    "windows and sinks": MODELS["neox, qwen, mistral"] | WEIGHED,
    "a fused loss": WEIGHED | {"cross_entropy_loss_fusion": True},
}
TP, PP, CP = (f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
SP = {TP: 2, "sequence_parallel": True}
# World size: what each run of it adds to the flags of one process.
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"micro_batch_size": 2},
        {**SP, "micro_batch_size": 4},
        {PP: 2, "micro_batch_size": 2},
        {CP: 2, "cp_comm_type": "p2p", "micro_batch_size": 2},
        {CP: 2, "cp_comm_type": "a2a", "micro_batch_size": 4},
    ],
    4: [
        {**SP, PP: 2, "num_virtual_stages_per_pipeline_rank": 2, "micro_batch_size": 2},
        {
            **SP,
            CP: 2,
            "cp_comm_type": "p2p",
            "micro_batch_size": 4,
            "recompute_granularity": "full",
        },
    ],
}
TAKEN = ("a prefix a document",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("prefixes"))


@pytest.fixture(scope="module")
def corpora(folder: Path) -> dict[bool, str]:
    """The corpus of text, and that of pairs (True)."""
    pairs = write_pairs(folder / "pairs", as_pairs(random_dialogues(160)))
    return {False: write_tiny_corpus(folder), True: pairs}


def train_in_blocks(configs: list[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`, in whose processes rows of any length have blocks for a mask."""
    with patch.object(prefix_attention, "PAIRS_OF_A_SPAN", 0):
        return train_prefix_all(configs)


def run_of(corpora: dict[bool, str], kind: str, **flags: Any) -> RunConfig:
    given = KINDS[kind] | flags
    return tiny_run(corpora["mtf" in given], **given)


def check_equal(records: list[Record], alone: Record, tolerance: float) -> None:
    assert_close(records[0].losses, alone.losses, tolerance)
    assert_close(records[0].grad_norms, alone.grad_norms, tolerance)
    for ours, expected in zip(records[0].evaluations, alone.evaluations, strict=True):
        assert_close(ours.means, expected.means, tolerance)
    state = {name: t for name, t in whole(records).items() if name.startswith("model/")}
    assert_all_close(state, whole([alone], prefix="model/"), tolerance)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in TAKEN else [pytest.mark.wide]) for k in KINDS]
)
def test_every_layout_trains_the_same_model(corpora: dict[bool, str], kind: str) -> None:
    ((alone,),) = run_on_ranks(1, train_prefix_all, [run_of(corpora, kind, **SHAPE)])
    assert len(set(alone.losses)) == len(alone.losses), "the weights are meant to move"
    for world_size, grids in GRIDS.items():
        runs = [run_of(corpora, kind, **SHAPE, **grid) for grid in grids]
        by_rank = run_on_ranks(world_size, train_in_blocks, runs)
        for at in range(len(grids)):
            check_equal([ranks[at] for ranks in by_rank], alone, FP64)


DEEPSPEED: list[dict[str, Any]] = [
    {"zero_stage": "3", "micro_batch_size": 2},
    {"zero_stage": "2", TP: 2, "micro_batch_size": 4},
    {"zero_stage": "1", PP: 2, "micro_batch_size": 2},
]


@pytest.mark.parametrize("kind", ["a prefix a row", pytest.param("pairs", marks=pytest.mark.wide)])
def test_both_engines_train_the_same_model(corpora: dict[bool, str], kind: str) -> None:
    flags = SHAPE | {"fp64": False, "optimizer": "sgd", "lr": 0.05}
    ((alone,),) = run_on_ranks(1, train_prefix_all, [run_of(corpora, kind, **flags)])
    runs = [run_of(corpora, kind, deepspeed=True, **flags, **grid) for grid in DEEPSPEED]
    by_rank = run_on_ranks(2, train_in_blocks, runs, deepspeed=True)
    for at in range(len(runs)):
        check_equal([ranks[at] for ranks in by_rank], alone, FP32)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("a prefix a row", {"num_workers": 2, "dataloader_type": "cyclic"}),
        pytest.param(
            "pairs", {"hidden_dropout": 0.1, "attention_dropout": 0.1}, marks=pytest.mark.wide
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_run(
    corpora: dict[bool, str], tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    plain = run_of(corpora, kind, **RESUMED, **more)
    check_resumed({kind: plain}, 1, tmp_path, train_in_blocks)


RESUMED: dict[str, Any] = {
    **{"fp64": False, "train_iters": FULL, "eval_iters": 1, "eval_interval": 3},
    "split": "60,20,20",
}
RESUMED_BY_DEEPSPEED: dict[str, dict[str, Any]] = {
    "gradients shared out": {"zero_stage": "2"},
    "its pipeline": {"zero_stage": "1", PP: 2, "num_layers": 4},
    "parameters shared out, in its layout": {"zero_stage": "3", "checkpoint_format": "deepspeed"},
}


@pytest.mark.parametrize(
    "kind",
    [
        "a prefix a document",
        pytest.param("a prefix a row", marks=pytest.mark.wide),
        pytest.param("pairs", marks=pytest.mark.wide),
    ],
)
def test_a_resumed_run_through_deepspeed_is_the_uninterrupted_run(
    corpora: dict[bool, str], tmp_path: Path, kind: str
) -> None:
    flags = {
        **{"deepspeed": True, "micro_batch_size": 2},
        **{"hidden_dropout": 0.1, "attention_dropout": 0.1},
    }
    runs = {
        name: run_of(corpora, kind, **RESUMED, **flags, **more)
        for name, more in RESUMED_BY_DEEPSPEED.items()
    }
    check_resumed(runs, 2, tmp_path, train_in_blocks, deepspeed=True)


def test_every_way_to_compute_attention_trains_the_same_model(corpora: dict[bool, str]) -> None:
    """Blocks, a mask, and blocks that are computed again."""
    ways = ({}, {"recompute_granularity": "selective"}, {"attention_backend": "unfused"})
    runs = [run_of(corpora, "a prefix a document", **SHAPE, **way) for way in ways]
    (masks,) = run_on_ranks(1, count_calls_of_blocks, train_prefix_all, runs[:1])
    (in_blocks,) = run_on_ranks(1, count_calls_of_blocks, train_in_blocks, runs)
    (mask, _), (blocks, calls), (again, twice_as_many), (unfused, _) = masks + in_blocks
    assert [count > 0 for _, count in masks + in_blocks] == [False, True, True, False]
    assert calls < twice_as_many <= 2 * calls, "evaluations are not recomputed"
    assert (blocks.losses, blocks.grad_norms) == (again.losses, again.grad_norms)
    for other in (mask, unfused):
        check_equal([other], blocks, FP64)


def count_calls_of_blocks(
    train_all: Callable[[list[RunConfig]], list[Record]], configs: list[RunConfig]
) -> list[tuple[Record, int]]:
    """A body for `run_on_ranks`: each record, and how often attention was computed in blocks."""
    counted = []
    for config in configs:
        with patch.object(attention, "attend_spans", wraps=prefix_attention.attend_spans) as blocks:
            (record,) = train_all([config])
        counted.append((record, blocks.call_count))
    return counted


def train_without_the_last_marks(config: RunConfig) -> Record:
    task = prefix_lm_task()

    def batch(raw: Any, options: Any) -> Any:
        made = task.batch(raw, options)
        *others, is_prefix = made.inputs
        shorter = is_prefix & torch.roll(is_prefix, -1, 1)
        inputs: Carry = (*others, shorter)
        return made._replace(inputs=inputs)

    return train(config, dataclasses.replace(task, batch=batch))


def test_a_prefix_that_is_one_token_shorter_is_seen(corpora: dict[bool, str]) -> None:
    config = run_of(corpora, "a prefix a row", **SHAPE)
    ((alone,),) = run_on_ranks(1, train_prefix_all, [config])
    (wrong,) = run_on_ranks(1, train_without_the_last_marks, config)
    with pytest.raises(AssertionError, match="apart"):
        check_equal([wrong], alone, FP64)
