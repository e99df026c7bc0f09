"""Causal or full attention whose gradient on a CPU is made of large matrix products.

PyTorch's fused kernel takes small blocks; products over hundreds of rows are faster where the CPU
multiplies bfloat16 by itself, and where it does not, so that they are in fp32. Forward stays that
kernel's.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import library
from megatron.ops.cpu_products import cpu_features, is_widened
from megatron.ops.dropout import dropout_add
from megatron.ops.library import gradient_of, operator, shapes_of, statistics_dtype

# Lengths at which products beat the fused kernel, by what the CPU multiplies bfloat16 with, best
# first: measured by benchmarks/attention.py, on an Intel with AMX and an AMD without.
_LENGTHS = {"amx_bf16": range(32, 1024), "avx512_bf16": range(32, 4097)}
_BLOCK_ROWS = 512  # rows of one head; a causal block leaves the keys behind its last row out
_BLOCK_BYTES = 4 << 20  # of the scores of one block, so that two of them stay in the cache
_PADDING = 8  # columns: two of L or D, and zeros, for products of odd widths are slow


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, without mask and dropout: [b, a, s, d].

    Args:
        q: [b, a, s, d] queries; those of one group are neighbours.
        k: [b, g, k, d] keys, where g divides a.
        v: as `k`.
        causal: a row sees keys up to its own position.
    """
    if not _is_faster_by_products(q, k):
        return attend_by_torch(q, k, v, causal=causal)
    return attend_by_products(q, k, v, causal)


def attend_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return the same by the kernels of torch, also under a mask and with dropout.

    On `meta`, where torch computes and keeps all scores, an operator that keeps none stands in for
    its fused kernels; not for a mask with a gradient, which kernels of CPUs compute from scores.
    """
    has_gradient = mask is not None and mask.requires_grad
    if q.is_meta and _may_fuse() and not has_gradient:
        return attend_by_products(q, k, v, causal)
    dtype = q.dtype
    if is_widened(q) and torch.is_grad_enabled():  # for the products of the backward pass
        q, k, v = q.float(), k.float(), v.float()
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=k.shape[1] < q.shape[1],
    )
    return out.to(dtype)


class ScoreChanges(NamedTuple):
    """What attention that holds all scores does with them and their probabilities.

    Attributes:
        sinks: [a] scores beside those of the keys, whose share of a row goes nowhere; or those of
            each row, of a shape that broadcasts to [b, a, s].
        soft_cap: the bound c of scores x, which become c tanh(x / c) (Gemma 2, arXiv 2408.00118,
            section 2); None: there is none.
        dropout: the probability of dropping one.
        names: of those that are dropped: the seed, and the numbers of queries, int64 [b, a, s].
    """

    sinks: Tensor | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    names: tuple[Tensor, Tensor] | None = None


def attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, changes: ScoreChanges
) -> Tensor:
    """Return the same with `changes` of scores and probabilities, all of which are in memory.

    Args:
        mask: as that of PyTorch's kernels, complete; None beside `causal`.
    """
    k, v = (for_each_head(t, q.shape[1]) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)).to(statistics_dtype(q)) / math.sqrt(q.shape[3])
    scores = soft_capped(scores, changes.soft_cap)
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        is_seen = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_seen else scores + mask
    if changes.sinks is not None:
        sinks = changes.sinks.to(scores.dtype)
        of_rows = sinks[:, None] if sinks.dim() == 1 else sinks
        column = of_rows.unsqueeze(-1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    probabilities = scores.softmax(3)[..., : k.shape[2]].to(q.dtype)
    if changes.names is not None:
        probabilities = dropout_add(probabilities, None, changes.dropout, *changes.names)
    return torch.matmul(probabilities, v)


def soft_capped(scores: Tensor, bound: float | None) -> Tensor:
    """Return c tanh(x / c) for the bound c of scores x, which lie within it then."""
    return scores if bound is None else bound * torch.tanh(scores / bound)


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the same on a CPU, with a gradient by large products at any length."""
    out: Tensor
    out, _ = torch.ops.megatron.attention(q, k, v, causal)
    return out


def _may_fuse() -> bool:
    """Return whether a kernel that stores no scores may be chosen (`sdpa_kernel`)."""
    kernels = torch.backends.cuda
    return bool(kernels.flash_sdp_enabled() or kernels.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


def for_each_head(keys: Tensor, heads: int) -> Tensor:
    """Return keys [b, g, k, d] once for each head of queries, [b, heads, k, d]; g divides heads."""
    b, groups, length, width = keys.shape
    if groups == heads:
        return keys
    expanded = keys.unsqueeze(2).expand(b, groups, heads // groups, length, width)
    return expanded.reshape(b, heads, length, width)


def _is_faster_by_products(q: Tensor, k: Tensor) -> bool:
    if q.shape[2] != k.shape[2]:
        return False
    if is_widened(q):
        return True
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.shape[2] in _FASTER_LENGTHS
        and library.INSTRUCTION_SET == "avx512"
    )


def _faster_lengths() -> range:
    """Return the lengths for this CPU; none where it, or torch, has no such instructions."""
    features = cpu_features()
    return next((lengths for name, lengths in _LENGTHS.items() if name in features), range(0))


_FASTER_LENGTHS = _faster_lengths()


@operator("attention(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor out, Tensor log_sums)")
def attention_reference(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output by PyTorch's kernel of the CPU, and the log-sum-exp of every row."""
    of_heads = [for_each_head(t, q.shape[1]) for t in (k, v)]
    out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, *of_heads, 0.0, causal
    )
    # The layout of the model, in which there is nothing to copy.
    return out.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3), log_sums


@shapes_of("attention")
def _attention_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    b, heads, length, width = q.shape
    out = q.new_empty((length, b, heads, width)).permute(1, 2, 0, 3)
    return out, q.new_empty((b, length, heads), dtype=statistics_dtype(q)).transpose(1, 2)


@operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums,"
    " bool causal) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)
def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from that of the output.

    With scores s of a row, their log-sum-exp L, probabilities P = e^(s - L), the gradient dO of the
    output O and D = sum(dO O): dV = P^T dO and, from dS = P (dO V^T - D), dQ = dS K, dK = dS^T Q
    (FlashAttention, arXiv 2205.14135, section 3.1 and appendix B.4).

    What a reader would get wrong: a product of bfloat16 is rounded to bfloat16, and a rounded score
    of 30 would be wrong by a tenth. So -L and -D are columns of the factors. For a row that sees m
    keys log(m) / 2 is added to -L: what is rounded is then as far from zero for equal
    probabilities, 1 / m, as for a single one, 1.

    Args:
        grad: [b, a, s, d], as `out`, the output.
        log_sums: [b, a, s] the log-sum-exp of every row, fp32 (fp64 of fp64).
    """
    if is_widened(q):
        grad, *operands, out = (t.float() for t in (grad, q, k, v, out))
        wide = torch.ops.megatron.attention_backward(grad, *operands, out, log_sums, causal)
        grad_q, grad_k, grad_v = (gradient.to(q.dtype) for gradient in wide)
        return grad_q, grad_k, grad_v
    (b, heads, length, width), groups = q.shape, k.shape[1]
    queries, scale = heads // groups, 1 / math.sqrt(width)
    means = (grad.to(log_sums.dtype) * out).sum(-1)
    every = torch.arange(1, length + 1, dtype=log_sums.dtype)
    sees = every if causal else every.new_full((length,), length)
    # Rows of a group: the queries of one position, then those of the next.
    rows, rows_of_grad = (
        _with_columns(_by_position(t, groups), _by_position(column, groups))
        for t, column in ((q, (log_sums - sees.log() / 2) / scale), (grad, means))
    )
    keys, values = (_with_columns(t.flatten(0, 1)) for t in (k, v))
    grad_q = torch.empty_like(rows[..., :width])
    blocks = _blocks(b * groups, length, queries, causal, q.itemsize)
    # Each block of rows adds to the gradients of the keys that it sees.
    is_sum = blocks[-1].first > 0
    sums = statistics_dtype(q) if is_sum else q.dtype
    grad_k, grad_v = (torch.zeros_like(t[..., :width], dtype=sums) for t in (keys, values))
    for of, first, stop, seen in blocks:
        block, of_keys = (of, slice(first * queries, stop * queries)), (of, slice(0, seen))
        scores = torch.bmm(rows[block], keys[of_keys].transpose(1, 2))
        slopes = torch.bmm(rows_of_grad[block], values[of_keys].transpose(1, 2))
        torch.ops.megatron.attention_gradient_(scores, slopes, scale, first, queries, causal)
        grad_q[block] = torch.bmm(slopes, keys[of_keys][..., :width])
        for total, left, right in (
            (grad_k[of_keys], slopes, rows[block]),
            (grad_v[of_keys], scores, rows_of_grad[block]),
        ):
            part = torch.bmm(left.transpose(1, 2), right[..., :width])
            total.add_(part) if is_sum else total.copy_(part)
    return (
        grad_q.view(b, groups, length, queries, width).transpose(2, 3).reshape(q.shape),
        grad_k.to(k.dtype).view(k.shape),
        grad_v.to(v.dtype).view(v.shape),
    )


@shapes_of("attention_backward")
def _gradient_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *output)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.megatron.attention_backward(grad, *ctx.saved_tensors, ctx.causal)
    return *gradients, None


gradient_of("attention", _backward, _save)


@operator(
    "attention_gradient_(Tensor(a!) scores, Tensor(b!) slopes, float scale, int first, int queries,"
    " bool causal) -> ()"
)
def attention_gradient_reference(
    scores: Tensor, slopes: Tensor, scale: float, first: int, queries: int, causal: bool
) -> None:
    """Replace scores by probabilities, and the slopes of those by the slopes of the scores.

    Args:
        scores: [n, rows, keys] q k - (L - log(m) / 2) / scale, of a row that sees m keys.
        slopes: as `scores`, dO V^T - D.
        first: the position of the first row.
        queries: rows that stand at the same position, one after the other.
        causal: keys behind the position of a row get zeros.
    """
    wide = scores.to(statistics_dtype(scores))
    rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
    sees = (first + 1 + rows // queries).clamp(max=len(keys)) if causal else rows * 0 + len(keys)
    hidden = keys >= sees.unsqueeze(1)
    probabilities = torch.exp(wide * scale) / sees.to(wide.dtype).sqrt().unsqueeze(1)
    gradients = slopes.to(wide.dtype) * (probabilities * scale)
    scores.copy_(probabilities.masked_fill_(hidden, 0.0))
    slopes.copy_(gradients.masked_fill_(hidden, 0.0))


@shapes_of("attention_gradient_")
def _shapes(
    scores: Tensor, slopes: Tensor, scale: float, first: int, queries: int, causal: bool
) -> None:
    return None


def _by_position(of_heads: Tensor, groups: int) -> Tensor:
    """Return [b, a, s, ..] as [b g, s n, ..]: n queries of a group at each position."""
    b, heads, length = of_heads.shape[:3]
    grouped = of_heads.reshape(b, groups, heads // groups, length, *of_heads.shape[3:])
    return grouped.transpose(2, 3).reshape(b * groups, -1, *of_heads.shape[3:])


def _with_columns(factor: Tensor, column: Tensor | None = None) -> Tensor:
    """Return [n, rows, d + 8]: a factor, and the columns that subtract `column` in the product.

    That of rows has `column` in two parts, rounded and what rounding left; that of keys -1 twice.
    """
    n, rows, width = factor.shape
    wider = factor.new_empty((n, rows, width + _PADDING))
    wider[..., :width] = factor
    wider[..., width:] = 0.0
    if column is None:
        wider[..., width : width + 2] = -1.0
    else:
        rounded = column.to(factor.dtype)
        wider[..., width] = rounded
        wider[..., width + 1] = column - rounded
    return wider


class _Block(NamedTuple):
    groups: slice
    first: int  # position of its first row
    stop: int  # the position behind that of its last
    seen: int  # keys that its rows may see


def _blocks(groups: int, length: int, queries: int, causal: bool, itemsize: int) -> list[_Block]:
    """Return blocks that hold all rows of all groups once, in the order of positions."""
    positions = max(1, _BLOCK_ROWS // queries)
    blocks = []
    for first in range(0, length, positions):
        stop = min(first + positions, length)
        seen = stop if causal else length
        together = max(1, _BLOCK_BYTES // ((stop - first) * queries * seen * itemsize))
        blocks += [
            _Block(slice(at, at + together), first, stop, seen) for at in range(0, groups, together)
        ]
    return blocks
