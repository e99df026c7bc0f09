"""Losses and counts of a step, summed over micro-batches, replicas and stages.

One place for all engines, so that they report the same numbers. A model may have several losses;
each is a mean over what it counts itself, and the sum of the means is minimised.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron import device
from megatron.config.model import ModelConfig
from megatron.engine.base import (
    EvaluationSum,
    Measure,
    MicroBatch,
    PretrainTask,
    StepPlan,
    StepReport,
)
from megatron.engine.expert_load import DROPPED, IDLE, MOST_LOADED
from megatron.errors import DataError
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import HostScalars, ScalarSums, flags_on_device
from megatron.optimizer.optimizer import OptimizerReport

COUNTS = "counts"  # of each loss, over the whole step
_TOTALS, _BALANCE, _SIGNALS = "totals", "balance of experts", "signals"
_LOG_Z = "squares of log Z"  # only with a z loss


def counts_ahead(
    task: PretrainTask, ahead: Sequence[MicroBatch], context: ParallelContext
) -> Tensor:
    """Return the count of each loss in a step from the labels alone: [k] float64.

    Sums over replicas: ranks that share sequences have whole labels. The caller checks them
    (`check_counts`).
    """
    own_counts = (
        torch.stack([task.counted(batch.labels).double() for batch in ahead]).sum(0).view(-1)
    )
    return all_reduce(own_counts, context.dp)


def check_counts(task: PretrainTask, counts: Sequence[float]) -> None:
    """Raise DataError where one loss has a count of zero over a whole step."""
    if all(counts):
        return
    if len(counts) == 1:
        raise DataError(
            "a global batch has no token that counts",
            found="a loss mask of zeros",
            fix="look at --eod-mask-loss and at the training data",
        )
    named = ", ".join(f"{name} {count:g}" for name, count in zip(task.losses, counts))
    raise DataError(
        "a global batch has nothing that one of its losses counts",
        found=f"counted of each: {named}",
        fix="look at the training data, or use a larger --global-batch-size",
    )


def step_sums(
    sums: Sequence[Tensor],
    task: PretrainTask,
    build: ModelBuild,
    signals: Tensor | None = None,
    *,
    with_metrics: bool = False,
) -> ScalarSums:
    """Return what `step_report` and `evaluation` read, on this rank, to be reduced.

    Args:
        sums: of every micro-batch its totals and counts, [2] or [2, k]; none but on the last stage.
        signals: `flags_on_device` of those of `Engine.start_step`; None: there are none.
        with_metrics: `sums` are those of `loss_and_metrics`.
    """
    num_sums = len(task.losses) + with_metrics * len(task.metrics)
    ctx = build.ctx
    own_sums = torch.zeros((2, num_sums), dtype=torch.float64, device=device.current())
    if sums:
        own_sums = torch.stack(list(sums)).double().sum(0).view(own_sums.shape)
    found = ScalarSums(ctx.world)
    found.add(_TOTALS, own_sums[0], contributes=ctx.tp.is_first)
    found.add(COUNTS, own_sums[1], contributes=ctx.tp.is_first)
    noted = build.router_loss.taken()
    # Of a split sequence each rank has summands, of its part.
    found.add(
        _BALANCE,
        torch.zeros((), device=device.current()) if noted is None else noted,
        contributes=build.sequence_parallel or ctx.tp.is_first,
    )
    if build.loss_state.z_loss_coeff > 0:
        squares = build.loss_state.taken_log_z()  # nothing but on the last stage
        found.add(
            _LOG_Z,
            torch.zeros((), device=device.current()) if squares is None else squares,
            contributes=ctx.tp.is_first,
        )
    found.add(_SIGNALS, flags_on_device(()) if signals is None else signals)
    return found


def step_report(
    scalars: Mapping[str, Sequence[float]],
    done: OptimizerReport,
    config: ModelConfig,
    plan: StepPlan,
) -> StepReport:
    """Return the report of one step, from the values of its sums and its update.

    The counts have been checked (`check_counts`).
    """
    means = tuple(total / count for total, count in zip(scalars[_TOTALS], scalars[COUNTS]))
    balance = None
    if config.balance_weight:
        # A mean over sequences and layers that have experts.
        balance = scalars[_BALANCE][0] / (plan.global_batch_size * sum(config.expert_layers))
    return StepReport(
        loss=sum(means),
        grad_norm=done.grad_norm,
        skipped=not done.applied,
        overflow=done.overflow,
        loss_scale=done.loss_scale,
        num_zeros=done.num_zeros,
        means=means if len(means) > 1 else (),
        load_balancing_loss=balance,
        z_loss=scalars[_LOG_Z][0] / scalars[COUNTS][0] if _LOG_Z in scalars else None,
        most_loaded_expert=scalars[MOST_LOADED][0] if MOST_LOADED in scalars else None,
        idle_experts=round(scalars[IDLE][0]) if IDLE in scalars else None,
        dropped_tokens=scalars[DROPPED][0] if DROPPED in scalars else None,
        signals=tuple(count > 0 for count in scalars[_SIGNALS]),
    )


def loss_and_metrics(task: PretrainTask, build: ModelBuild) -> Measure:
    """Return the function that measures the losses of a micro-batch, then its metrics."""

    def measure(carry: Carry, labels: Carry) -> LossSum:
        loss = task.loss(carry, labels, build)
        parts = [loss, *(metric(carry, labels) for metric in task.metrics.values())]
        dtype = loss.total.dtype
        return LossSum(
            torch.cat([part.total.to(dtype).view(-1) for part in parts]),
            torch.cat([part.count.to(dtype).view(-1) for part in parts]),
        )

    return measure


def evaluation(sums: Sequence[Tensor], task: PretrainTask, build: ModelBuild) -> EvaluationSum:
    """Return the result of an evaluation over the `sums` of its micro-batches.

    Those of its losses, and of its metrics where it has some.
    """
    scalars = HostScalars(step_sums(sums, task, build, with_metrics=True).reduce()).read()
    found = [EvaluationSum(total, count) for total, count in zip(scalars[_TOTALS], scalars[COUNTS])]
    losses, metrics = found[: len(task.losses)], found[len(task.losses) :]
    means = [one.total / one.tokens if one.tokens else math.nan for one in metrics]
    return losses[0]._replace(others=tuple(losses[1:]), metrics=tuple(zip(task.metrics, means)))
