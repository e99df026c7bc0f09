"""Cross entropy of logits whose vocabulary is split over the tensor-parallel ranks.

The logits and two numbers of each token are all that lives between forward and backward. Columns
at or beyond the true vocabulary are padding: they add nothing to the loss and their gradient is
exactly zero. Which tokens count is the caller's business: it multiplies the losses by its mask.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.layers import check_ids
from megatron.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, ctx: ParallelContext, true_vocab_size: int
) -> Tensor:
    """Return the loss of every token, -log softmax(logits)[label], over the whole true vocabulary.

    The sum over ranks takes one small all-gather of each rank's own sums; its gradient takes no
    communication. Works in fp32 (fp64 for fp64 logits).

    Args:
        logits: [s, b, v/tp], any floating dtype; not changed.
        labels: [s, b] int64 ids of the whole vocabulary, equal on all tp ranks. A negative label
            means that there is nothing to predict: its loss and its gradient are zero.

    Returns:
        [s, b] fp32 or fp64 losses, equal on all tp ranks.

    Raises:
        DataError: a label is not in the true vocabulary (on CUDA: a device-side assert).
    """
    return cross_entropy_and_log_z(logits, labels, ctx=ctx, true_vocab_size=true_vocab_size)[0]


def cross_entropy_and_log_z(
    logits: Tensor, labels: Tensor, *, ctx: ParallelContext, true_vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return `vocab_parallel_cross_entropy` and log Z of every token, both differentiable.

    Z is the sum of e^logit over the true vocabulary. log Z is of the shape and dtype of the losses,
    zero and without a gradient where a label is negative.
    """
    check_ids(labels.clamp_min(0), true_vocab_size)
    function: Callable[..., tuple[Tensor, Tensor]] = _VocabParallelCrossEntropy.apply
    return function(logits, labels, ctx, true_vocab_size)


class LossGradient(NamedTuple):
    """What the gradient of [n] losses by this rank's [n, v/tp] logits needs beside the logits."""

    column: Tensor  # [n] of the label; no column of this rank where another has it, or none
    largest: Tensor  # [n] logit of the whole vocabulary
    total: Tensor  # [n] sum of e^(logit - largest) over the whole vocabulary
    ignored: Tensor  # [n] whether there is nothing to predict

    def log_z(self) -> Tensor:
        """Return log Z [n], the log of the sum of e^logit; zero where there is nothing to predict.

        Not a field: only a z loss needs it.
        """
        return (self.largest + self.total.log()).masked_fill_(self.ignored, 0.0)

    def replace(
        self, logits: Tensor, grad: Tensor, true_width: int, grad_log_z: Tensor | None
    ) -> Tensor:
        """Write the gradient of the sum of `grad` [n] times the losses in place of the logits.

        With `grad_log_z` [n] the gradient of the sum of `grad_log_z` times log Z is added. The
        gradient of log Z is the softmax, so this changes the factor on the softmax alone.
        """
        grad = grad.masked_fill(self.ignored, 0.0)
        of_softmax = grad
        if grad_log_z is not None:
            of_softmax = grad + grad_log_z.masked_fill(self.ignored, 0.0)
        return cross_entropy_gradient_(
            logits,
            self.column,
            shift=self.largest,
            scale=of_softmax / self.total,
            at_label=grad,
            true_width=true_width,
        )


def true_columns(columns: int, tp: Group, true_vocab_size: int) -> int:
    """Return how many of this rank's `columns` are in the true vocabulary; they are its first."""
    return min(max(true_vocab_size - tp.rank * columns, 0), columns)


def token_losses(
    logits: Tensor, labels: Tensor, tp: Group, true_vocab_size: int
) -> tuple[Tensor, LossGradient]:
    """Return the losses [n] of contiguous logits [n, v/tp], and what their gradient needs.

    The labels [n] are in the true vocabulary; a negative one is ignored.
    """
    width = logits.shape[1]
    column = labels - tp.rank * width
    statistics = cross_entropy_statistics(logits, column, true_columns(width, tp, true_vocab_size))
    everyone = all_gather(statistics.unsqueeze(0), tp)  # [tp, 3, n]
    # A rank that does not have the label's column, or no column at all, has -inf.
    largest, target = everyone[:, 0].amax(dim=0), everyone[:, 2].amax(dim=0)
    total = ((everyone[:, 0] - largest).exp_() * everyone[:, 1]).sum(dim=0)
    ignored = labels < 0
    losses = (total.log() - (target - largest)).masked_fill_(ignored, 0.0)
    return losses, LossGradient(column, largest, total, ignored)


class _LossContext(FunctionContext):
    true_width: int


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LossContext,
        logits: Tensor,
        labels: Tensor,
        parallel: ParallelContext,
        true_vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        losses, gradient = token_losses(rows, labels.reshape(-1), parallel.tp, true_vocab_size)
        ctx.save_for_backward(logits, *gradient)
        ctx.true_width = true_columns(rows.shape[1], parallel.tp, true_vocab_size)
        ctx.set_materialize_grads(False)  # of a result that nothing uses there is no gradient
        return losses.view(labels.shape), gradient.log_z().view(labels.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(
        ctx: _LossContext, grad: Tensor | None, grad_log_z: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, *parts = ctx.saved_tensors
        gradient = LossGradient(*parts)
        result = logits.clone(memory_format=torch.contiguous_format)
        gradient.replace(
            result.view(-1, logits.shape[-1]),
            torch.zeros_like(gradient.total) if grad is None else grad.reshape(-1),
            ctx.true_width,
            None if grad_log_z is None else grad_log_z.reshape(-1),
        )
        return result, None, None, None
