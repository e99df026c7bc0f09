"""Losses as sums and counts, so that averages over microbatches and ranks are exact.

A mean of means would weigh a microbatch with few counted tokens as much as a full one. Dividing
is the engine's business, once, by the count of the whole global batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.mpu.context import ParallelContext
from megatron.mpu.cross_entropy import cross_entropy_and_log_z
from megatron.mpu.linear_cross_entropy import LossState, linear_cross_entropy


class LossSum(NamedTuple):
    """The sum of the losses of counted items, and their number: scalars.

    A model with several losses has a sum and a count for each of them, both [k]. What is minimised
    is then the sum of their means.
    """

    total: Tensor  # differentiable, fp32 or wider
    # Same dtype as total; a sum of weights when the mask is fractional. Hides tuple.count().
    count: Tensor  # type: ignore[assignment]

    @property
    def mean(self) -> Tensor:
        """Average loss per counted token; not a number when none was counted."""
        return self.total / self.count


def language_model_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    *,
    ctx: ParallelContext,
    true_vocab_size: int,
    state: LossState | None = None,
) -> LossSum:
    """Return the cross entropy of the next token over tokens that `loss_mask` counts.

    The z loss of `state` enters by its gradient alone: the value of the total is the cross entropy.

    Args:
        logits: [s, b, v/tp], any floating dtype.
        labels: [b, s] int64; a negative label counts for nothing.
        loss_mask: [b, s], 1 where a token counts and 0 where not; None: all count.
        state: the weight of the z loss, and where its sum is kept; None: there is no z loss.
    """
    by_sequence = labels.t()  # [s, b]
    losses, log_z = cross_entropy_and_log_z(
        logits, by_sequence, ctx=ctx, true_vocab_size=true_vocab_size
    )
    mask = None if loss_mask is None else loss_mask.t()
    weights = _weights(by_sequence, mask, losses.dtype)
    total = torch.sum(losses if loss_mask is None else losses * weights)
    if state is not None and state.z_loss_coeff > 0 and log_z.requires_grad:
        z_loss = state.z_loss_coeff * state.note_log_z(log_z, weights)
        total = total + (z_loss - z_loss.detach())  # plus zero, with the gradient of the z loss
    return LossSum(total, weights.sum())


def fused_language_model_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor | None,
    *,
    ctx: ParallelContext,
    true_vocab_size: int,
    sequence_parallel: bool,
    state: LossState | None = None,
) -> LossSum:
    """Return `language_model_loss` of the logits hidden weight^T, which are never held all at once.

    Args:
        hidden: [s, b, h]; [s/tp, b, h] under sequence parallelism.
        weight: [v/tp, h].
        labels: [b, s] int64; a negative label counts for nothing.
        loss_mask: [b, s], 1 where a token counts and 0 where not; None: all count.
        state: of `linear_cross_entropy`.
    """
    by_sequence = labels.t()  # [s, b]
    mask = None if loss_mask is None else loss_mask.t()
    weights = _weights(by_sequence, mask, torch.promote_types(weight.dtype, torch.float32))
    total = linear_cross_entropy(
        hidden,
        weight,
        by_sequence,
        weights,
        ctx=ctx,
        true_vocab_size=true_vocab_size,
        sequence_parallel=sequence_parallel,
        state=state,
    )
    return LossSum(total, weights.sum())


def counted_tokens(labels: Tensor, loss_mask: Tensor | None) -> Tensor:
    """Return the count of `language_model_loss` as a scalar, from labels [b, s] and mask."""
    return _weights(labels, loss_mask, torch.float32).sum()


def _weights(labels: Tensor, loss_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    # The reader of the data marks ignored labels in one of two ways; both must leave the count.
    weights = (labels >= 0).to(dtype)
    return weights if loss_mask is None else weights * loss_mask
