"""Cross entropy of logits whose vocabulary is split over the tensor-parallel ranks.

One softmax buffer in fp32 is all that lives between forward and backward, and backward turns it
into the gradient in place. Columns at or beyond the true vocabulary are padding: they add nothing
to the loss and their gradient is exactly zero. Which tokens count is the caller's business: it
multiplies the losses by its mask.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.layers import check_ids

# Elements handled at once. On a CPU the passes over one chunk then find it in the cache: forward
# and backward of 2048 x 50304 fp32 logits on two threads take 143 ms (157 with padded columns),
# against 145 (609) ms in one piece and 403 (617) ms by F.cross_entropy. On a GPU chunks only bound
# the temporary copy that padded columns need.
_CHUNK_ELEMENTS = {"cpu": 2**19}
_CHUNK_ELEMENTS_ELSEWHERE = 2**28


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, ctx: ParallelContext, true_vocab_size: int
) -> Tensor:
    """Return the loss of every token, -log softmax(logits)[label], over the whole true vocabulary.

    The sum over ranks takes one small all-gather of each rank's own log-sum-exp; its gradient
    takes no communication. Works in fp32 (fp64 for fp64 logits).

    Args:
        logits: [s, b, v/tp], any floating dtype; not changed.
        labels: [s, b] int64 ids of the whole vocabulary, equal on all tp ranks. A negative label
            means that there is nothing to predict: its loss and its gradient are zero.

    Returns:
        [s, b] fp32 or fp64 losses, equal on all tp ranks. Backward works once: a second call
        (`retain_graph`) raises, because the first has reused the softmax.

    Raises:
        DataError: a label is not in the true vocabulary (on CUDA: a device-side assert).
    """
    check_ids(labels.clamp_min(0), true_vocab_size)
    function: Callable[..., Tensor] = _VocabParallelCrossEntropy.apply
    return function(logits, labels, ctx, true_vocab_size)


class LossGradient(NamedTuple):
    """The parts of the gradient of [n] losses by this rank's [n, v/tp] logits."""

    softmax: Tensor  # [n, v/tp] over this rank's true columns; zero in padded ones
    share: Tensor  # [n]; softmax over the whole vocabulary = local softmax * share
    label: Tensor  # [n, 1] column of the label; any column where the label is elsewhere
    elsewhere: Tensor  # [n, 1] whether another rank has the label's column, or no rank has
    ignored: Tensor  # [n] whether there is nothing to predict

    def compute(self, grad: Tensor) -> Tensor:
        """Return the gradient of the sum of `grad` [n] times the losses, in place of `softmax`."""
        grad = grad.masked_fill(self.ignored, 0.0).unsqueeze(1)
        scale = self.share.unsqueeze(1) * grad
        at_label = self.softmax.gather(1, self.label) * scale
        at_label -= grad.masked_fill(self.elsewhere, 0.0)
        return self.softmax.mul_(scale).scatter_(1, self.label, at_label)


def token_losses(
    logits: Tensor,
    labels: Tensor,
    tp: Group,
    true_vocab_size: int,
    *,
    softmax: Tensor | None = None,
) -> tuple[Tensor, LossGradient]:
    """Return the losses [n] of logits [n, v/tp], and the parts of their gradient.

    Args:
        labels: [n]; a negative one is ignored. The others are in the true vocabulary.
        softmax: [n, v/tp] in fp32 (fp64 for fp64 logits), memory for the result's; None: new.
    """
    width = logits.shape[1]
    start = tp.rank * width
    local = _local_softmax(logits, min(max(true_vocab_size - start, 0), width), softmax)
    label = labels.unsqueeze(1) - start
    elsewhere = (label < 0) | (label >= width)
    label = label.masked_fill(elsewhere, 0)
    # The label's logit, from the rank that has it; -inf contributes nothing to the maximum.
    target = logits.gather(1, label).to(local.log_sum.dtype).masked_fill(elsewhere, -torch.inf)
    everyone = all_gather(torch.stack((local.log_sum, target.squeeze(1))).unsqueeze(0), tp)
    log_sum = everyone[:, 0].logsumexp(dim=0)
    ignored = labels < 0
    losses = (log_sum - everyone[:, 1].amax(dim=0)).masked_fill_(ignored, 0.0)
    share = (local.log_sum - log_sum).exp_()
    return losses, LossGradient(local.softmax, share, label, elsewhere, ignored)


class _LossContext(FunctionContext):
    shape: torch.Size
    dtype: torch.dtype


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LossContext,
        logits: Tensor,
        labels: Tensor,
        parallel: ParallelContext,
        true_vocab_size: int,
    ) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        losses, gradient = token_losses(rows, labels.reshape(-1), parallel.tp, true_vocab_size)
        ctx.save_for_backward(*gradient)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _LossContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        result = LossGradient(*ctx.saved_tensors).compute(grad.reshape(-1))
        return result.to(ctx.dtype).view(ctx.shape), None, None, None


class _LocalSoftmax(NamedTuple):
    softmax: Tensor  # [n, v/tp] over this rank's true columns; zero in padded ones
    log_sum: Tensor  # [n] log of the sum of exponentials over the same columns


def _local_softmax(logits: Tensor, true_width: int, out: Tensor | None) -> _LocalSoftmax:
    """Return the softmax of [n, v/tp] over the first `true_width` columns, and its normaliser.

    The normaliser is max(x) - log(max(softmax)): where softmax is largest it is at least
    1 / width, so the logarithm loses nothing.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    softmax = logits.new_empty(logits.shape, dtype=dtype) if out is None else out
    log_sum = logits.new_empty(logits.shape[:1], dtype=dtype)
    if true_width == 0:
        return _LocalSoftmax(softmax.zero_(), log_sum.fill_(-torch.inf))
    for rows in _chunks(logits):
        chunk = logits[rows]
        if true_width < logits.shape[1]:
            chunk = chunk.clone()
            chunk[:, true_width:] = -torch.inf
        torch.softmax(chunk, dim=1, dtype=dtype, out=softmax[rows])
        log_sum[rows] = chunk.amax(dim=1).to(dtype) - softmax[rows].amax(dim=1).log()
    return _LocalSoftmax(softmax, log_sum)


def _chunks(logits: Tensor) -> Iterator[slice]:
    limit = _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    rows = max(1, limit // logits.shape[1])
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)
