"""Projection to the vocabulary and cross entropy as one operation, without all logits in memory.

The logits of a chunk of tokens exist only while the chunk is processed. The loss is a scalar sum,
so its gradients are known up to one factor as soon as a chunk's softmax is: the forward pass
computes them, and the backward pass only multiplies by the factor and reduces over tp. This takes
the same three matrix products as the separate operations, and keeps [n, h] and [v/tp, h] for the
backward pass instead of [n, v/tp]; [n, h] alone where the factor is known before.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megatron.errors import ConfigError
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.cross_entropy import LossGradient, token_losses, true_columns
from megatron.mpu.layers import check_ids
from megatron.mpu.weight_gradients import (
    GradientSum,
    add_product,
    element_blocks,
    gradient_sum,
    weight_gradient,
)
from megatron.ops.cpu_products import matrix_product

# Bytes of the logits of one chunk: of fp32 and a vocabulary of 50304 on a CPU, 347 tokens. Smaller
# chunks make the matrix products slower, larger ones take more memory (benchmarks/head_loss.py).
_CHUNK_BYTES = {"cpu": 70 * 10**6}
_CHUNK_BYTES_ELSEWHERE = 2**28


def _lend_nothing(size: int, besides: GradientSum | None) -> Tensor | None:
    del size, besides
    return None


@dataclass(slots=True)
class LossState:
    """What the loss of a language model knows and keeps beyond one micro-batch.

    `factor` is what the backward pass will multiply the sum by, a scalar, where the caller knows it
    before: the gradients of a fused loss have it from the start, and that of a weight with a
    `GradientSum` is added there in the forward pass. An engine sets it before a step; None: not
    known.

    `z_loss_coeff` is the weight C of the z loss, C log^2 Z of each counted token (PaLM, Chowdhery
    et al. 2022, arXiv 2204.02311, section 5), with Z the sum of e^logit over the true vocabulary.
    It enters by its gradient alone: losses that are returned do not have it.

    `soft_cap` is the bound c of the logits x of a fused loss, which become c tanh(x / c); None:
    there is none.

    `lend` returns memory of so many bytes, uint8, that nobody else uses while the loss is computed,
    or None. It is told where the gradient of the head's weight is added meanwhile. An engine sets
    it for a step.
    """

    factor: Tensor | float | None = None
    z_loss_coeff: float = 0.0
    soft_cap: float | None = None
    lend: Callable[[int, GradientSum | None], Tensor | None] = _lend_nothing
    _log_z_squares: Tensor | None = None
    _logits: Tensor | None = None

    @property
    def kept_bytes(self) -> int:
        """Size of the memory for logits that is kept."""
        return 0 if self._logits is None else self._logits.nbytes

    def end_step(self) -> None:
        """Forget what an engine has set for the present step."""
        self.factor, self.lend = None, _lend_nothing

    def note_log_z(self, log_z: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of `weights` times log^2 Z, a scalar, and keep it for the report.

        Called once for each token whose gradient is computed.
        """
        total = (log_z.square() * weights).sum()
        noted = total.detach()
        before = self._log_z_squares
        self._log_z_squares = noted if before is None else before + noted
        return total

    def taken_log_z(self) -> Tensor | None:
        """Return the sum of what was noted since the last call; None where nothing was."""
        total, self._log_z_squares = self._log_z_squares, None
        return total

    def memory_for(
        self, like: Tensor, shape: tuple[int, int], besides: GradientSum | None = None
    ) -> Tensor:
        """Return memory for logits of the dtype and device of `like`, of undefined content.

        On a CPU it is lent, or kept for the next micro-batch. Smaller tensors would take its place
        once it is free, which outlive the step, and the next chunk would find no room as large.

        Args:
            besides: where the gradient of the head's weight is added meanwhile.
        """
        if not like.is_cpu:
            return like.new_empty(shape)
        size = shape[0] * shape[1]
        lent = self.lend(size * like.itemsize, besides)
        if lent is not None:
            return lent.view(like.dtype).view(shape)
        if self._logits is None or self._logits.dtype != like.dtype or self._logits.numel() < size:
            self._logits = None  # before its successor is there
            self._logits = like.new_empty(size)
        return self._logits[:size].view(shape)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    *,
    ctx: ParallelContext,
    true_vocab_size: int,
    sequence_parallel: bool = False,
    state: LossState | None = None,
) -> Tensor:
    """Return the weighted sum of -log softmax(hidden weight^T)[label] over all tokens: a scalar.

    The loss of a token is that of `vocab_parallel_cross_entropy`, in fp32 (fp64 for fp64 weights).
    Without gradients (`torch.no_grad`) only the loss is computed. With `state.z_loss_coeff` the
    gradients are those of the loss and the z loss of the same tokens, with the same weights.

    Args:
        hidden: [s, b, h]; [s/tp, b, h] under sequence parallelism, where its gradient is too.
        weight: [v/tp, h] of the same dtype, the rows of this rank's part of the vocabulary.
        labels: [s, b] int64 ids of the whole vocabulary, equal on all tp ranks. A negative label
            means that there is nothing to predict: it adds nothing to the loss or the gradients.
        token_weights: [s, b] factors on the losses, without a gradient; None: all are 1.
        state: what is known and kept beyond this call; None: nothing.

    Returns:
        The sum, equal on all tp ranks. Backward works once: a second call (`retain_graph`) raises
        where the first has reused the memory of the gradients.

    Raises:
        DataError: a label is not in the true vocabulary (on CUDA: a device-side assert).
        ConfigError: from the backward pass, whose factor is another one (likewise).
    """
    check_ids(labels.clamp_min(0), true_vocab_size)
    state = state or LossState()
    head = _Head(
        ctx.tp,
        true_vocab_size,
        sequence_parallel,
        torch.is_grad_enabled(),
        state.factor if torch.is_grad_enabled() else None,
        state,
    )
    function: Callable[..., Tensor] = _LinearCrossEntropy.apply
    return function(hidden, weight, labels, token_weights, head)


def chunk_rows(
    rows: int, weight: Sequence[int], itemsize: int, device_type: str, *, has_sum: bool = False
) -> int:
    """Return how many of `rows` tokens are processed at a time; the last chunk may be smaller.

    `weight` is the shape [v/tp, h], `itemsize` the bytes of an element of it and of the logits.
    In half precision a gradient of the weight [v/tp, h] that several chunks add to takes 6 bytes
    for each element before it is rounded, that of one chunk 2: up to 2h tokens in one chunk, whose
    logits take 2 bytes, need no more memory. Not so where the gradient `has_sum`, a `GradientSum`
    that it is added to in any case; there a CPU takes less memory in smaller chunks. The result is
    equal on all tp ranks, which communicate per chunk.
    """
    columns, width = weight
    is_added_anyway = has_sum and device_type == "cpu"
    if itemsize < 4 and rows <= 2 * width and not is_added_anyway:
        return max(1, rows)
    limit = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE) // itemsize
    chunks = max(1, -(-rows // max(1, limit // columns)))
    return max(1, -(-rows // chunks))


class _Head(NamedTuple):
    tp: Group
    true_vocab_size: int
    sequence_parallel: bool
    trains: bool  # whether gradients may be asked for
    factor: Tensor | float | None  # of the gradients, where it is known
    state: LossState


class _HeadContext(FunctionContext):
    head: _Head
    shape: torch.Size  # of the whole input, [s, b, h]
    dtype: torch.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor | None,
        head: _Head,
    ) -> Tensor:
        whole = all_gather(hidden, head.tp) if head.sequence_parallel else hidden
        rows, row_labels = whole.reshape(-1, whole.shape[-1]), labels.reshape(-1)
        has_sum = head.factor is not None and gradient_sum(weight) is not None
        size = chunk_rows(
            rows.shape[0], weight.shape, weight.itemsize, weight.device.type, has_sum=has_sum
        )
        wide = torch.promote_types(weight.dtype, torch.float32)
        losses = rows.new_empty(rows.shape[0], dtype=wide)
        row_weights = torch.ones_like(losses)
        if token_weights is not None:
            row_weights.copy_(token_weights.reshape(-1))
        factors = row_weights if head.factor is None else row_weights * head.factor
        grad_hidden = grad_weight = place = None
        if head.trains and ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(rows)
        if head.trains and ctx.needs_input_grad[1]:
            place = gradient_sum(weight) if has_sum else None
        if head.trains and ctx.needs_input_grad[1] and place is None:
            # One chunk's product has all tokens, and is rounded once as it is.
            grad_weight = torch.empty_like(
                weight, dtype=wide if size < rows.shape[0] else weight.dtype
            )
        # Allocated once: new memory for every chunk would cost as much as its softmax.
        logits_memory = head.state.memory_for(rows, (size, weight.shape[0]), gradient_sum(weight))
        true_width = true_columns(weight.shape[0], head.tp, head.true_vocab_size)
        for chunk in _chunks(rows.shape[0], size):
            inputs = rows[chunk]
            logits = matrix_product(inputs, weight.t(), out=logits_memory[: inputs.shape[0]])
            trains = grad_hidden is not None or grad_weight is not None or place is not None
            slopes = _cap_(logits, head.state.soft_cap, needs_slopes=trains)
            losses[chunk], gradient = token_losses(
                logits, row_labels[chunk], head.tp, head.true_vocab_size
            )
            if not trains:
                continue
            grad_log_z = _grad_log_z(gradient, row_weights[chunk], factors[chunk], head.state)
            grad_logits = gradient.replace(logits, factors[chunk], true_width, grad_log_z)
            if slopes is not None:
                grad_logits.mul_(slopes)
            if grad_hidden is not None:
                matrix_product(grad_logits, weight, out=grad_hidden[chunk])
            if place is not None:
                place.add_product(inputs, grad_logits, weight_gradient)
            elif grad_weight is not None:
                add_product(grad_weight, grad_logits, inputs, is_first=chunk.start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)  # type: ignore[arg-type]  # takes None
        ctx.head, ctx.shape, ctx.dtype = head, whole.shape, weight.dtype
        return losses.mul_(row_weights).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _HeadContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden: Tensor | None
        grad_weight: Tensor | None
        grad_hidden, grad_weight = ctx.saved_tensors
        reducing: Pending | None = None
        factor: Tensor | None = grad
        if ctx.head.factor is not None:
            _check_factor(grad, ctx.head.factor)
            factor = None  # the gradients have it
        if grad_hidden is not None:
            whole = _finished(grad_hidden, factor, ctx.dtype).view(ctx.shape)
            start = start_reduce_scatter if ctx.head.sequence_parallel else start_all_reduce
            reducing = start(whole, ctx.head.tp)
        if grad_weight is not None:  # while the other gradient is reduced
            grad_weight = _finished(grad_weight, factor, ctx.dtype)
        grad_input = None if reducing is None else reducing.wait()
        return grad_input, grad_weight, None, None, None


def _grad_log_z(
    gradient: LossGradient, weights: Tensor, factors: Tensor, state: LossState
) -> Tensor | None:
    """Return the gradient of the z loss of a chunk by log Z [n]; None without a z loss."""
    if state.z_loss_coeff == 0:
        return None
    log_z = gradient.log_z()
    state.note_log_z(log_z, weights)
    return log_z.mul_(2 * state.z_loss_coeff).mul_(factors)


def _cap_(logits: Tensor, bound: float | None, *, needs_slopes: bool) -> Tensor | None:
    """Replace logits x by c tanh(x / c); return the slopes, 1 - tanh^2(x / c), if there is a c."""
    if bound is None:
        return None
    logits.div_(bound).tanh_()
    slopes = 1 - logits.square() if needs_slopes else None
    logits.mul_(bound)
    return slopes


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, max(1, rows), size):  # of no rows one empty chunk, for zero gradients
        yield slice(start, min(start + size, rows))


def _check_factor(found: Tensor, announced: Tensor | float) -> None:
    if isinstance(announced, Tensor):
        announced = announced.to(found.dtype)
    if found.is_cuda:
        # Asynchronous: an exception would have to wait for the device at every step.
        torch._assert_async(found == announced, _OTHER_FACTOR)
    elif not found.is_meta and not bool(found == announced):
        raise ConfigError(
            _OTHER_FACTOR,
            found=f"{float(found)}, and {float(announced)} in the forward pass",
            fix="multiply the loss by LossState.factor, or leave that None",
        )


_OTHER_FACTOR = "the loss is multiplied by another factor than its gradients were computed for"


def _finished(total: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `total` [n, h] times a scalar tensor, rounded once to `dtype`; may overwrite it."""
    if factor is None:
        increment_version(total)  # so that a second backward pass raises, as it does below
        return total.to(dtype)
    if total.dtype == dtype == factor.dtype:
        return total.mul_(factor)
    result = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    memory = torch.empty(0, dtype=factor.dtype, device=total.device)
    for block in element_blocks(total, parts=4):
        # In memory that is used again: a scalar times half precision would be rounded before.
        wide = memory.resize_(total[block].shape).copy_(total[block])
        result[block].copy_(wide.mul_(factor))
    return result
