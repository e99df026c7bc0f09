"""Losses and counts of a step, on one rank."""

import math
from dataclasses import replace

import pytest
import torch

from megatron.config.experts import LoadBalancing
from megatron.engine.base import EvaluationSum, MicroBatch, PretrainTask, StepPlan, StepReport
from megatron.engine.tally import (
    check_counts,
    counts_ahead,
    evaluation,
    loss_and_metrics,
    step_report,
    step_sums,
)
from megatron.errors import DataError
from megatron.model.losses import LossSum
from megatron.model.specs import Carry
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState
from megatron.mpu.scalar_sums import HostScalars, flags_on_device
from megatron.optimizer.optimizer import OptimizerReport
from pretrain_gpt import gpt_task
from tests.support.models import tiny_build, tiny_config

ALONE = ParallelContext.single()
ONE = gpt_task()
TWO = replace(ONE, losses=("words", "order"))
PLAN = StepPlan(2, 4, 0.1, 0.0, 12, 0)
DONE = OptimizerReport(applied=True, finite=True, grad_norm=2.0, loss_scale=1.0)


def labelled(*counted: int) -> list[MicroBatch]:
    """Micro-batches of 4 tokens, so many of which are counted."""
    return [
        MicroBatch((), (torch.zeros(1, 4, dtype=torch.int64), (torch.arange(4) < n)[None].float()))
        for n in counted
    ]


def reported(sums: list[torch.Tensor], task: PretrainTask = ONE, **flags: object) -> StepReport:
    """The report of a step with these sums of its micro-batches."""
    signals = flags_on_device((True, False))
    values = HostScalars(step_sums(sums, task, tiny_build(), signals).reduce()).read()
    return step_report(values, DONE, tiny_config(**flags), PLAN)


def test_tokens_are_counted_before_they_are_seen() -> None:
    assert counts_ahead(gpt_task(), labelled(4, 1, 0), ALONE).tolist() == [5.0]


def test_a_step_that_counts_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="a global batch has no token that counts"):
        check_counts(gpt_task(), [0.0])
    with pytest.raises(DataError, match="nothing that one of its losses counts") as error:
        check_counts(TWO, [3.0, 0.0])
    assert "words 3, order 0" in str(error.value)


def test_a_report_has_means_over_what_was_counted() -> None:
    report = reported([torch.tensor([6.0, 3.0]), torch.tensor([2.0, 1.0])])
    assert (report.loss, report.means, report.grad_norm, report.skipped) == (2.0, (), 2.0, False)
    assert report.signals == (True, False)


def test_the_balance_of_experts_is_a_mean_over_sequences_and_layers() -> None:
    build = tiny_build()
    config = tiny_config(
        num_layers=3,
        num_experts=3,
        moe_layer_freq="[0,1,1]",
        add_bias_linear=False,
        moe_router_load_balancing_type=LoadBalancing.SEQ_AUX_LOSS,
        moe_aux_loss_coeff=0.5,
    )
    for of_two_sequences in (2.0, 3.0, 2.5, 2.5):  # two layers in two micro-batches
        build.router_loss.note(torch.tensor(of_two_sequences))
    balances = []
    for _ in range(2):
        values = HostScalars(step_sums([torch.ones(2)], gpt_task(), build).reduce()).read()
        balances.append(step_report(values, DONE, config, PLAN).load_balancing_loss)
    assert balances == [10 / (4 * 2), 0.0]  # it was taken
    assert reported([torch.ones(2)]).load_balancing_loss is None


def test_the_z_loss_is_a_mean_over_the_tokens_that_count() -> None:
    build, sums = tiny_build(loss_state=LossState(z_loss_coeff=0.1)), [torch.tensor([6.0, 4.0])]
    for log_z in (1.0, 3.0):
        build.loss_state.note_log_z(torch.tensor([log_z, 9.0]), torch.tensor([2.0, 0.0]))
    z_losses = []
    for _ in range(2):
        values = HostScalars(step_sums(sums, ONE, build).reduce()).read()
        z_losses.append(step_report(values, DONE, tiny_config(), PLAN).z_loss)
    assert z_losses == [(2 * 1.0 + 2 * 9.0) / 4, 0.0]  # it was taken
    assert reported(sums).z_loss is None


def test_an_evaluation_is_a_mean_by_weights_that_are_no_whole_numbers() -> None:
    sums = [torch.tensor([6.0, 1.25]), torch.tensor([1.5, 1.25])]
    result = evaluation(sums, ONE, tiny_build())
    assert (result.tokens, result.mean) == (2.5, 3.0)


def test_several_losses_are_told_apart_and_added() -> None:
    sums = [torch.tensor([[6.0, 1.0], [3.0, 2.0]])]
    report = reported(sums, TWO)
    assert (report.loss, report.means) == (2.5, (2.0, 0.5))
    assert evaluation(sums, TWO, tiny_build()) == EvaluationSum(6.0, 3, (EvaluationSum(1.0, 2),))


def test_metrics_are_means_of_their_own_beside_the_loss() -> None:
    def right(carry: Carry, labels: Carry) -> LossSum:
        return LossSum(carry[0].sum(), torch.tensor(4.0))

    task = replace(
        ONE,
        loss=lambda carry, labels, build: LossSum(labels[0].sum(), torch.tensor(2.0)),
        metrics={"right": right, "none": lambda carry, labels: LossSum(*torch.zeros(2))},
    )
    measure = loss_and_metrics(task, tiny_build())
    sums = [torch.stack(measure((torch.full((2,), n),), (torch.ones(3),))) for n in (0.5, 1.0)]
    result = evaluation(sums, task, tiny_build())
    assert (result.total, result.tokens, result.mean) == (6.0, 4.0, 1.5)
    (first, share), (second, nothing) = result.metrics
    assert (first, share, second) == ("right", 3.0 / 8, "none")
    assert math.isnan(nothing), "nothing was counted"
    assert evaluation([torch.tensor([6.0, 3.0])], ONE, tiny_build()).metrics == ()
