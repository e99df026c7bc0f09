"""The batch law: how a global batch is cut into micro-batches and replicas changes nothing.

Losses are sums and counts, so this holds for ragged masks too, where a mean of means would weigh
a micro-batch with few counted tokens as much as a full one.
"""

from pathlib import Path
from typing import Any

import pytest

from megatron.config.experts import LoadBalancing
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    EOD,
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

SIZES = {1: (8, 1, 2, 4), 2: (4, 1, 2)}  # data-parallel size: micro-batch sizes of 8 samples


def ends_counted(microbatch: list[list[int]]) -> int:
    """Tokens of a micro-batch that --eod-mask-loss leaves out."""
    return sum(row[:-1].count(EOD) for row in microbatch)


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_micro_batches_and_replicas_make_no_difference(tmp_path: Path, order: str) -> None:
    corpus = write_tiny_corpus(tmp_path)
    found: dict[tuple[int, int], list[Record]] = {}
    for world_size, sizes in SIZES.items():
        configs = [
            tiny_run(
                corpus,
                **MODELS["ragged"],
                hidden_dropout=0.1,
                attention_dropout=0.1,
                micro_batch_size=size,
                dataloader_type=order,
                eval_iters=2,
                eval_interval=2,
            )
            for size in sizes
        ]
        by_rank = run_on_ranks(world_size, train_all, configs)
        for at, size in enumerate(sizes):
            found[world_size, size] = [records[at] for records in by_rank]
    one = found[1, 8][0]
    ragged = [ends_counted(batch) for batch in found[1, 1][0].trained_on]
    assert len(set(ragged)) > 2, "the masks are meant to differ between micro-batches"
    assert max(one.grad_norms) > 0.5, "clipping is meant to be active"
    expected = whole([one], prefix="model/")
    for (world_size, size), records in found.items():
        assert records[0].plans[0].num_microbatches == 8 // size // world_size
        assert_close(records[0].losses, one.losses, FP64)
        assert_close(records[0].grad_norms, one.grad_norms, FP64)
        assert_all_close(whole(records, prefix="model/"), expected, FP64)
        assert [e.tokens for e in records[0].evaluations] == [e.tokens for e in one.evaluations]
        assert_close(
            [e.mean for e in records[0].evaluations], [e.mean for e in one.evaluations], FP64
        )


# Experts that drop tokens; ranks that share them, and ranks that share sequences.
EXPERTS: dict[str, Any] = {
    **MODELS["mixtral"],
    "moe_expert_capacity_factor": 1.0,
    "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
    "moe_aux_loss_coeff": 0.1,
    "eod_mask_loss": True,
    "hidden_dropout": 0.1,
}
CUTS: dict[int, list[dict[str, Any]]] = {
    1: [{"micro_batch_size": size} for size in (8, 1)],
    2: [
        {"expert_model_parallel_size": 2, "micro_batch_size": 4},
        {"expert_model_parallel_size": 2, "micro_batch_size": 1},
        {"context_parallel_size": 2, "micro_batch_size": 8},
        {"context_parallel_size": 2, "expert_model_parallel_size": 2, "micro_batch_size": 2},
    ],
    4: [
        {"context_parallel_size": 2, "expert_model_parallel_size": 2, "micro_batch_size": 1},
        {"context_parallel_size": 2, "expert_model_parallel_size": 4, "micro_batch_size": 4},
    ],
}


def test_nor_do_they_where_sequences_and_experts_are_shared(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path)
    found = []
    for world_size, cuts in CUTS.items():
        configs = [tiny_run(corpus, **EXPERTS, **cut) for cut in cuts]
        found += [*zip(*run_on_ranks(world_size, train_all, configs))]
    (one,), *others = found
    expected = whole([one], prefix="model/")
    assert all(step.dropped_tokens for step in one.steps)
    for records in others:
        assert_close(records[0].losses, one.losses, FP64)
        assert_close(records[0].grad_norms, one.grad_norms, FP64)
        assert_all_close(whole(records, prefix="model/"), expected, FP64)
        assert [s.dropped_tokens for s in records[0].steps] == [s.dropped_tokens for s in one.steps]
