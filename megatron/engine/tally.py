"""Losses and counts of a step, summed over micro-batches, replicas and stages.

One place for all engines, so that they report the same numbers. A model may have several losses;
each is a mean over what it counts itself, and the sum of the means is minimised.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron import device
from megatron.config.model import ModelConfig
from megatron.engine.base import EvaluationSum, MicroBatch, PretrainTask, StepPlan, StepReport
from megatron.errors import DataError
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext
from megatron.optimizer.optimizer import OptimizerReport


def counts_ahead(
    task: PretrainTask, ahead: Sequence[MicroBatch], context: ParallelContext
) -> Tensor:
    """Return the count of each loss in a step from the labels alone: [k] float64.

    Sums over replicas.

    Raises:
        DataError: one of them counts nothing, so there is nothing to divide by.
    """
    own_counts = (
        torch.stack([task.counted(batch.labels).double() for batch in ahead]).sum(0).view(-1)
    )
    counts = all_reduce(own_counts, context.dp)
    check_counts(task, counts.tolist())
    return counts


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


def balance_of_experts(config: ModelConfig, build: ModelBuild, plan: StepPlan) -> float | None:
    """Return the loss that balances experts, a mean over the sequences and layers of a step.

    Without its weight, and equal on all ranks; None where there is none.
    """
    if config.balance_weight == 0:
        return None
    noted, ctx = build.router_loss.taken(), build.ctx
    own_loss = torch.zeros((), dtype=torch.float64, device=device.current())
    own_loss = own_loss if noted is None else noted.double()
    total = all_reduce(all_reduce(own_loss, ctx.dp), ctx.pp)
    if build.sequence_parallel:  # each rank has summands, of its part of the sequences
        total = all_reduce(total, ctx.tp)
    return float(total) / (plan.global_batch_size * config.num_layers)


class Tally:
    """Totals and counts of each loss, in float64 and equal on all ranks.

    Args:
        sums: of every micro-batch its totals and counts, [2] or [2, k]; none but on the last stage.
    """

    def __init__(
        self, sums: Sequence[Tensor], task: PretrainTask, context: ParallelContext
    ) -> None:
        shape = (2, len(task.losses))
        own_sums = torch.zeros(shape, dtype=torch.float64, device=device.current())
        if sums:
            own_sums = torch.stack(list(sums)).double().sum(0).view(shape)
        both = all_reduce(all_reduce(own_sums, context.dp), context.pp)
        self.totals, self.counts = both.tolist()

    def report(self, done: OptimizerReport, *, balance: float | None = None) -> StepReport:
        """Return the report of one step, from its update and the load of the experts."""
        means = tuple(total / count for total, count in zip(self.totals, self.counts))
        return StepReport(
            loss=sum(means),
            grad_norm=done.grad_norm,
            skipped=not done.applied,
            overflow=done.overflow,
            loss_scale=done.loss_scale,
            num_zeros=done.num_zeros,
            means=means if len(means) > 1 else (),
            load_balancing_loss=balance,
        )

    def evaluation(self) -> EvaluationSum:
        """Return the totals and counts as the result of an evaluation."""
        first, *others = (
            EvaluationSum(total, round(count)) for total, count in zip(self.totals, self.counts)
        )
        return first._replace(others=tuple(others))
