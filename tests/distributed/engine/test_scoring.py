"""Scores are the same on every grid, and each row is scored once."""

import io
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.engine.evaluation_memory import EvaluationMemory
from megatron.engine.scoring import RowScore, Scorer, ScoringRow
from megatron.errors import MachineError
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.models import roughen, tiny_build
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run

# Seven rows: no grid shares them out evenly.
ROWS = [ScoringRow(tuple((3 * i + j * j) % 50 for j in range(2 + i)), 1 + i // 2) for i in range(7)]
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
            for actual, expected in zip(found, alone):
                # float64: only the order of additions differs
                assert actual.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-10)
                assert actual[1:] == expected[1:]


def score_short_of_memory(most: int, ranks: list[int], parallel: dict[str, Any]) -> Any:
    """Scores on two ranks, of which some run out of memory above so many rows at a time."""
    config = tiny_run("nowhere", seq_length=12, num_layers=4, **parallel)
    tp = config.parallel.tensor_model_parallel_size
    ctx = ParallelContext.build(Topology(tp=tp, pp=1, dp=dist.get_world_size() // tp))
    scorer = Scorer(
        config,
        tiny_build(ctx, vocab=VocabSize(50, 64)),
        micro_batch_size=4,
        memory=EvaluationMemory(config, tiny_build(ctx)),
    )
    roughen(scorer.stage, ctx)
    real = scorer._batch

    def short(rows: Any, which: Any) -> Any:
        if len(which) > most and ctx.rank in ranks:
            raise torch.OutOfMemoryError("no more")
        return real(rows, which)

    scorer._batch = short  # type: ignore[method-assign]
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            return scorer.score(ROWS), output.getvalue()
    except MachineError as error:
        return str(error)


def test_a_replica_short_of_memory_makes_all_go_on_with_fewer_rows() -> None:
    (expected, silent), _ = run_on_ranks(2, score_short_of_memory, 2, [], {})
    assert silent == ""
    for most in (2, 1):  # of the three rows that are left, each rank takes two at most
        (found, message), (other, _) = run_on_ranks(2, score_short_of_memory, most, [1], {})
        assert found == other
        assert "all ranks go on with 2" in message
        assert "rank 1 ran out of memory with --micro-batch-size 4" in message
        for actual, reference in zip(found, expected):
            assert actual.log_likelihood == pytest.approx(reference.log_likelihood, rel=1e-10)
            assert actual[1:] == reference[1:]


def test_memory_that_is_not_enough_for_one_row_ends_the_evaluation_on_all_ranks() -> None:
    for message in run_on_ranks(2, score_short_of_memory, 0, [0, 1], {}):
        assert "memory ran out while rows were scored" in message


def test_inside_of_a_model_that_is_spread_nobody_goes_on_alone() -> None:
    spread = {"tensor_model_parallel_size": 2}
    for message in run_on_ranks(2, score_short_of_memory, 3, [0, 1], spread):
        assert "memory ran out while rows were scored" in message
        assert "use --micro-batch-size 2" in message


def reserve_short_of_memory() -> tuple[int, str]:
    """What two ranks that share a model agree on when one of them gets little."""
    ctx = ParallelContext.build(Topology(tp=2, pp=1, dp=1))
    memory = EvaluationMemory(tiny_run("nowhere"), tiny_build(ctx))
    if ctx.rank == 1:
        object.__setattr__(memory, "_can_be_taken", lambda rows, length: rows <= 3)
    output = io.StringIO()
    with redirect_stderr(output):
        return memory.agreed_rows(8, 8), output.getvalue()


def test_ranks_that_share_a_model_agree_before_they_begin() -> None:
    (first, message), (second, _) = run_on_ranks(2, reserve_short_of_memory)
    assert (first, second) == (2, 2)
    assert "all ranks go on with 4" in message
