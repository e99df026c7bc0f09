"""Projection to the vocabulary and cross entropy as one operation, without all logits in memory.

The logits of a chunk of tokens exist only while the chunk is processed. The loss is a scalar sum,
so its gradients are known up to one factor as soon as a chunk's softmax is: the forward pass
computes them, and the backward pass only multiplies by the factor and reduces over tp. This takes
the same three matrix products as the separate operations, and keeps [n, h] and [v/tp, h] for the
backward pass instead of [n, v/tp].
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.cross_entropy import token_losses, true_columns
from megatron.mpu.layers import check_ids

# Bytes of the logits of one chunk: of fp32 and a vocabulary of 50304 on a CPU, 667 tokens. Smaller
# chunks make the matrix products slower, larger ones take more memory.
_CHUNK_BYTES = {"cpu": 2**27}
_CHUNK_BYTES_ELSEWHERE = 2**28
# Half-precision products are added to the fp32 sum in blocks of so many elements, and gradients
# multiplied in quarters of them. On a CPU they are then still in the cache.
_BLOCK_ELEMENTS = {"cpu": 2**21}
_BLOCK_ELEMENTS_ELSEWHERE = 2**28


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | None,
    *,
    ctx: ParallelContext,
    true_vocab_size: int,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the weighted sum of -log softmax(hidden weight^T)[label] over all tokens: a scalar.

    The loss of a token is that of `vocab_parallel_cross_entropy`, in fp32 (fp64 for fp64 weights).
    Without gradients (`torch.no_grad`) only the loss is computed.

    Args:
        hidden: [s, b, h]; [s/tp, b, h] under sequence parallelism, where its gradient is too.
        weight: [v/tp, h] of the same dtype, the rows of this rank's part of the vocabulary.
        labels: [s, b] int64 ids of the whole vocabulary, equal on all tp ranks. A negative label
            means that there is nothing to predict: it adds nothing to the loss or the gradients.
        token_weights: [s, b] factors on the losses, without a gradient; None: all are 1.

    Returns:
        The sum, equal on all tp ranks. Backward works once: a second call (`retain_graph`) raises
        where the first has reused the memory of the gradients.

    Raises:
        DataError: a label is not in the true vocabulary (on CUDA: a device-side assert).
    """
    check_ids(labels.clamp_min(0), true_vocab_size)
    head = _Head(ctx.tp, true_vocab_size, sequence_parallel, torch.is_grad_enabled())
    function: Callable[..., Tensor] = _LinearCrossEntropy.apply
    return function(hidden, weight, labels, token_weights, head)


def chunk_rows(rows: int, weight: Sequence[int], itemsize: int, device_type: str) -> int:
    """Return how many of `rows` tokens are processed at a time; the last chunk may be smaller.

    `weight` is the shape [v/tp, h], `itemsize` the bytes of an element of it and of the logits.
    In half precision a gradient of the weight [v/tp, h] that several chunks add to takes 6 bytes
    for each element before it is rounded, that of one chunk 2: up to 2h tokens in one chunk, whose
    logits take 2 bytes, need no more memory. The result is equal on all tp ranks, which communicate
    per chunk.
    """
    columns, width = weight
    if itemsize < 4 and rows <= 2 * width:
        return max(1, rows)
    limit = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE) // itemsize
    chunks = max(1, -(-rows // max(1, limit // columns)))
    return max(1, -(-rows // chunks))


class _Head(NamedTuple):
    tp: Group
    true_vocab_size: int
    sequence_parallel: bool
    trains: bool  # whether gradients may be asked for


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
        size = chunk_rows(rows.shape[0], weight.shape, weight.itemsize, weight.device.type)
        wide = torch.promote_types(weight.dtype, torch.float32)
        losses = rows.new_empty(rows.shape[0], dtype=wide)
        row_weights = torch.ones_like(losses)
        if token_weights is not None:
            row_weights.copy_(token_weights.reshape(-1))
        grad_hidden = grad_weight = None
        if head.trains and ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(rows)
        if head.trains and ctx.needs_input_grad[1]:
            # One chunk's product has all tokens, and is rounded once as it is.
            grad_weight = torch.empty_like(
                weight, dtype=wide if size < rows.shape[0] else weight.dtype
            )
        # Allocated once: new memory for every chunk would cost as much as its softmax.
        logits_memory = rows.new_empty((size, weight.shape[0]))
        true_width = true_columns(weight.shape[0], head.tp, head.true_vocab_size)
        for chunk in _chunks(rows.shape[0], size):
            inputs = rows[chunk]
            logits = torch.mm(inputs, weight.t(), out=logits_memory[: inputs.shape[0]])
            losses[chunk], gradient = token_losses(
                logits, row_labels[chunk], head.tp, head.true_vocab_size
            )
            if grad_hidden is None and grad_weight is None:
                continue
            grad_logits = gradient.replace(logits, row_weights[chunk], true_width)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, inputs, is_first=chunk.start == 0)
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
        if grad_hidden is not None:
            whole = _scaled(grad_hidden, grad, ctx.dtype).view(ctx.shape)
            start = start_reduce_scatter if ctx.head.sequence_parallel else start_all_reduce
            reducing = start(whole, ctx.head.tp)
        if grad_weight is not None:  # while the other gradient is reduced
            grad_weight = _scaled(grad_weight, grad, ctx.dtype)
        grad_input = None if reducing is None else reducing.wait()
        return grad_input, grad_weight, None, None, None


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, max(1, rows), size):  # of no rows one empty chunk, for zero gradients
        yield slice(start, min(start + size, rows))


def _add_product(total: Tensor, rows_out: Tensor, rows_in: Tensor, *, is_first: bool) -> None:
    """Add rows_out^T rows_in to `total` [out, in]; the first product replaces its content.

    Half-precision products are added up in fp32. In half precision a sum of many chunks would lose
    the products that are small beside it, and round at every chunk.
    """
    if total.dtype == rows_out.dtype:
        torch.addmm(total, rows_out.t(), rows_in, beta=0 if is_first else 1, out=total)
        return
    for block in _blocks(total):
        product = torch.mm(rows_out[:, block].t(), rows_in)
        if is_first:
            total[block].copy_(product)
        else:
            total[block].add_(product)


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total` [n, h] times a scalar tensor, rounded once to `dtype`; may overwrite it."""
    if total.dtype == dtype == factor.dtype:
        return total.mul_(factor)
    result = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    memory = torch.empty(0, dtype=factor.dtype, device=total.device)
    for block in _blocks(total, parts=4):
        # In memory that is used again: a scalar times half precision would be rounded before.
        wide = memory.resize_(total[block].shape).copy_(total[block])
        result[block].copy_(wide.mul_(factor))
    return result


def _blocks(total: Tensor, parts: int = 1) -> Iterator[slice]:
    limit = _BLOCK_ELEMENTS.get(total.device.type, _BLOCK_ELEMENTS_ELSEWHERE) // parts
    size = max(1, limit // total.shape[1])
    for start in range(0, total.shape[0], size):
        yield slice(start, start + size)
