"""Replicas: one verdict over a gradient, one count of tokens, one norm, and drift is named."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist

from megatron.engine.base import StepPlan, StepReport
from megatron.engine.native import NativeEngine
from megatron.errors import DataError, NumericsError
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP64, tiny_run
from tests.unit.engine.engines import ONLY_ENDS, runtime_of, tiny_batches

PLAN = StepPlan(
    num_microbatches=1,
    global_batch_size=2,
    learning_rate=0.01,
    weight_decay=0.1,
    seq_length=16,
    first_sample=0,
)


def engine_of(tp: int, pp: int = 1, **flags: object) -> NativeEngine:
    context = ParallelContext.build(Topology.fill(dist.get_world_size(), tp=tp, pp=pp))
    runtime = dataclasses.replace(runtime_of(tiny_run("nowhere", **flags)), context=context)
    return NativeEngine(runtime.config, gpt_task(), model_build(runtime), runtime.tokenizer)


def ragged_then_broken() -> tuple[list[StepReport], list[str], float]:
    engine = engine_of(1, eod_mask_loss=True)
    rank = dist.get_rank()
    messages = []
    # Rank 1 has nothing to count; the mean is over the tokens of rank 0.
    own = tiny_batches(1, token=ONLY_ENDS if rank else None)
    reports = [engine.train_step(iter(own), PLAN)]
    with torch.no_grad():
        kept = engine.stage.get_parameter("final_norm.weight")[0].clone()
        if rank == 1:
            engine.stage.get_parameter("final_norm.weight")[0] = math.inf
    try:
        engine.check_replicas()
    except NumericsError as error:
        messages.append(f"{error.problem}: {error.found}")
    reports.append(engine.train_step(iter(tiny_batches(1)), PLAN))
    with torch.no_grad():
        engine.stage.get_parameter("final_norm.weight")[0] = kept
    engine.check_replicas()  # the weights of both are as they were
    try:
        engine.train_step(iter(tiny_batches(1, token=ONLY_ENDS)), PLAN)
    except DataError as error:
        messages.append(error.problem)
    return reports, messages, engine.params_norm()


def test_replicas_act_as_one() -> None:
    zero, one = run_on_ranks(2, ragged_then_broken)
    assert zero[0][0] == one[0][0]
    assert math.isfinite(zero[0][0].loss)
    for reports, messages, _ in (zero, one):
        assert reports[1].skipped
        assert "1 of" in messages[0]
        assert "final_norm.weight" in messages[0]
        assert messages[1] == "a global batch has no token that counts"
    assert zero[2] == one[2]


def loss_of_a_step(tp: int) -> float:
    engine = engine_of(tp, tensor_model_parallel_size=tp, eod_mask_loss=True)
    replicas = engine._context.dp
    own = tiny_batches(2)[replicas.rank :: replicas.size]
    plan = dataclasses.replace(PLAN, num_microbatches=len(own))
    return engine.train_step(iter(own), plan).loss


def test_a_loss_is_summed_over_replicas_and_counted_once_for_a_replica() -> None:
    (alone,) = run_on_ranks(1, loss_of_a_step, 1)
    for tp in (1, 2):
        assert run_on_ranks(2, loss_of_a_step, tp) == pytest.approx([alone, alone], rel=FP64)


def parted_over_tp() -> str:
    engine = engine_of(2)
    engine.check_replicas()
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine.stage.get_parameter("final_norm.weight")[0] += 1
    try:
        engine.check_replicas()
    except NumericsError as error:
        return f"{error.problem}: {error.found}"
    return ""


def test_what_is_not_split_stays_equal_over_tensor_parallel_ranks() -> None:
    for message in run_on_ranks(2, parted_over_tp):
        assert (
            "tensor-parallel ranks hold different values of weights that are not split" in message
        )
        assert "final_norm.weight, on ranks [1] against rank 0" in message


def parted_over_stages() -> str:
    engine = engine_of(1, 2, pipeline_model_parallel_size=2)
    engine.train_step(iter(tiny_batches(1)), PLAN)
    engine.check_replicas()  # both stages have summed the gradients of what they share
    if dist.get_rank() == 1:
        with torch.no_grad():
            engine.stage.tied_parameters()["embedding.word.weight"][0] += 1
    try:
        engine.check_replicas()
    except NumericsError as error:
        return f"{error.problem}: {error.found}"
    return ""


def test_what_stages_share_stays_equal_over_them() -> None:
    for message in run_on_ranks(2, parted_over_stages):
        assert "pipeline stages hold different values of weights that they share" in message
        assert "embedding.word.weight, on ranks [0, 1]" in message


def step_of_split_sequences() -> None:
    engine = engine_of(2, tensor_model_parallel_size=2, sequence_parallel=True)
    engine.train_step(iter(tiny_batches(1)), PLAN)
    engine.check_replicas()


def test_norms_of_split_sequences_stay_equal_over_ranks() -> None:
    run_on_ranks(2, step_of_split_sequences)


def norm_of_parameters(tp: int) -> float:
    return engine_of(tp).params_norm()


def test_a_norm_counts_replicated_parameters_once() -> None:
    (alone,) = run_on_ranks(1, norm_of_parameters, 1)
    assert run_on_ranks(2, norm_of_parameters, 2) == pytest.approx([alone, alone], rel=FP64)
