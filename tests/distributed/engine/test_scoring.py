"""Scores are the same on every grid, and each row is scored once."""

from typing import Any

import pytest
import torch.distributed as dist

from megatron.engine.scoring import Row, RowScore, Scorer
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import roughen, tiny_build
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run

# Seven rows: no grid shares them out evenly.
ROWS = [Row(tuple((3 * i + j * j) % 50 for j in range(2 + i)), 1 + i // 2) for i in range(7)]
GRIDS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {},
    ],
    4: [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ],
}


def score_on(grids: list[dict[str, Any]]) -> list[list[RowScore]]:
    found = []
    for grid in grids:
        config = tiny_run("nowhere", seq_length=12, num_layers=4, **grid)
        parallel = config.parallel
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        dp = dist.get_world_size() // (tp * pp)
        ctx = ParallelContext.build(Topology(tp=tp, pp=pp, dp=dp))
        vocab = VocabSize(50, 50 if tp == 1 else 64)
        build = tiny_build(ctx, vocab=vocab, sequence_parallel=parallel.sequence_parallel)
        scorer = Scorer(config, build, micro_batch_size=2)
        roughen(scorer.stage, ctx)
        found.append(scorer.score(ROWS))
        assert scorer.score(ROWS[:1]) == found[-1][:1] or dp > 1  # fewer batches than replicas
    return found


def test_every_grid_finds_the_same() -> None:
    ((alone,),) = run_on_ranks(1, score_on, GRIDS[1])
    assert [score.num_tokens for score in alone] == [len(row.tokens) - row.first for row in ROWS]
    for world_size in (2, 4):
        by_rank = run_on_ranks(world_size, score_on, GRIDS[world_size])
        assert all(ranks == by_rank[0] for ranks in by_rank)
        for found in by_rank[0]:
            for mine, expected in zip(found, alone):
                # float64: only the order of additions differs
                assert mine.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-10)
                assert mine[1:] == expected[1:]
