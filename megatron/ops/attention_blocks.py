"""Attention of queries to some of their keys, and the sum of such parts.

With the log-sum-exp L of the scores of every row, outputs of disjoint sets of keys add up to the
output for all of them, and the gradient for a set of keys needs nothing else than the final output
and L (Liu et al. 2023, arXiv 2310.01889; the merge is that of FlashAttention, arXiv 2205.14135).

What a reader would get wrong: of a row that sees no key of a block, kernels return L = 0.
"""

import math

import torch
from torch import Tensor

from megatron.ops.attention import for_each_head
from megatron.ops.library import statistics_dtype

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output for these keys alone, [b, a, s, d], and L of every row, [b, a, s].

    Args:
        q: [b, a, s, d] queries; those of one group are neighbours.
        k: [b, g, k, d] keys, where g divides a.
        v: as `k`.
        mask: booleans (True: may attend) or numbers to add to scores, [1 or b, 1 or a, s, k].
        causal: query i sees keys up to number i; without a mask.

    L is fp32 (fp64 of fp64) and -inf for a row without keys, whose output is zeros.
    """
    k, v = (for_each_head(t, q.shape[1]) for t in (k, v))
    bias = None if mask is None else _bias(mask, q.dtype)
    if q.device.type != "cuda":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias
        )
    elif bias is None and q.dtype in _FLASH_DTYPES:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        return attend_block_reference(q, k, v, bias, causal=causal)
    if bias is None:
        return out, sums
    sees_none = (bias == -torch.inf).all(dim=-1)
    return out.masked_fill(sees_none.unsqueeze(-1), 0.0), sums.masked_fill(sees_none, -torch.inf)


def attend_block_gradients(
    grad: Tensor,
    operands: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for these keys alone.

    Args:
        grad: [b, a, s, d], of the output for all keys.
        operands: q, k and v, as for `attend_block`; so are `mask` and `causal`.
        out: the output for all keys.
        log_sums: [b, a, s] L of all keys; finite.
    """
    q, *keys_values = operands
    k, v = (for_each_head(t, q.shape[1]) for t in keys_values)
    bias = None if mask is None else _bias(mask, q.dtype)
    given = (grad, q, k, v, out, log_sums)
    if q.device.type != "cuda":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*given, 0.0, causal, attn_mask=bias)
    elif bias is None and q.dtype in _FLASH_DTYPES:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths, state = (None, None, q.shape[2], k.shape[2]), q.new_empty(2, dtype=torch.uint64)
        dq, dk, dv = backward(*given, *lengths, 0.0, causal, state, state)
    else:
        dq, dk, dv = block_gradients_reference(*given, bias, causal=causal)
    groups = operands[1].shape[1]
    dk, dv = (t.unflatten(1, (groups, -1)).sum(2) if t.shape[1] > groups else t for t in (dk, dv))
    return dq, dk, dv


def merge_(out: Tensor, log_sums: Tensor, part: Tensor, part_log_sums: Tensor) -> None:
    """Add the output for further keys to that for others, in place.

    With w = sigmoid(L' - L): O + w (O' - O), and L - log(1 - w). Neither overflows.

    Args:
        out: [b, a, s, d] fp32 or wider.
        log_sums: [b, a, s] its L; finite.
        part: as `out`, in any dtype, with L in `part_log_sums`, which may be -inf.
    """
    further = part_log_sums - log_sums
    out.add_(torch.sigmoid(further).unsqueeze(-1) * (part - out))
    log_sums.sub_(torch.nn.functional.logsigmoid(-further))


def add_sinks_(out: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Add to the output for all keys a sink of each head, in place.

    A sink b adds e^b to the sum of a row's exponentials (gpt-oss, arXiv 2508.10925): it is a
    further key whose value is zero, and merges like a block of keys with L = b.

    Args:
        out: [b, a, s, d] fp32 or wider.
        log_sums: [b, a, s] its L; finite.
        sinks: [a] scores, or those of each row, of a shape that broadcasts to `log_sums`.
    """
    scores = (sinks[:, None] if sinks.dim() == 1 else sinks).to(log_sums.dtype)
    out.mul_(torch.sigmoid(log_sums - scores).unsqueeze(-1))
    log_sums.copy_(torch.logaddexp(log_sums, scores))


def sink_gradients(grad: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, [a].

    With the probability P = e^(b - L) of a sink in a row and D = sum(dO O), as its value is zero:
    db = sum over rows of P (0 - D).

    Args:
        grad: [b, a, s, d], of the output.
        out: the output.
        log_sums: [b, a, s] L of all keys and of the sinks.
        sinks: [a] scores.
    """
    shares = (sinks.to(log_sums.dtype)[:, None] - log_sums).exp()
    means = (grad.to(log_sums.dtype) * out).sum(-1)
    return -(shares * means).sum((0, 2)).to(sinks.dtype)


def attend_block_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return `attend_block` by PyTorch's operations, for as many heads of keys as of queries."""
    scores = _scores(q, k, bias, causal=causal)
    sums = scores.logsumexp(dim=-1)
    shares = (scores - sums.unsqueeze(-1)).exp().nan_to_num_(0.0)
    return (shares @ v.to(shares.dtype)).to(q.dtype), sums


def block_gradients_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    bias: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by PyTorch's operations; see `ops/attention.py` for the formula."""
    shares = (_scores(q, k, bias, causal=causal) - log_sums.unsqueeze(-1)).exp()
    wide, scale = grad.to(shares.dtype), 1 / math.sqrt(q.shape[-1])
    slopes = wide @ v.to(shares.dtype).transpose(-1, -2)
    slopes = shares * (slopes - (wide * out).sum(-1, keepdim=True)) * scale
    dk, dv = slopes.transpose(-1, -2) @ q.to(shares.dtype), shares.transpose(-1, -2) @ wide
    return (slopes @ k.to(shares.dtype)).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    wide = statistics_dtype(q)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what kernels add to scores, in their dtype."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
