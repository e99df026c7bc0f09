"""Products of matrices in half precision, in fp32 where the CPU has no instructions for them.

PyTorch multiplies them element by element there, which takes up to a hundred times as long as in
fp32. Here they are widened in blocks that a cache holds, and results rounded once, as the
instructions of other CPUs round.
"""

from functools import cache

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**21  # of an operand that are widened at a time


def matrix_product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return a b + bias of [n, k], [k, m] and [m]; in `out` if there is one. Without autograd."""
    if not is_widened(a):
        if bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(bias, a, b, out=out)
    n, k, m = *a.shape, b.shape[1]
    out = a.new_empty(n, m) if out is None else out
    wide_bias = torch.zeros(m) if bias is None else bias.float()
    # Blocks of the longest of the three: the other operand, or the sum, is widened whole.
    if k >= max(n, m):
        total = wide_bias.expand(n, m).contiguous()
        for block in _blocks(k, n + m):
            torch.addmm(total, a[:, block].float(), b[block].float(), out=total)
        return out.copy_(total)
    if m >= n:
        wide = a.float()
        for block in _blocks(m, k):
            out[:, block] = torch.addmm(wide_bias[block], wide, b[:, block].float())
        return out
    wide = b.float()
    for block in _blocks(n, k):
        out[block] = torch.addmm(wide_bias, a[block].float(), wide)
    return out


def is_widened(tensor: Tensor) -> bool:
    """Return whether products with `tensor` are computed in fp32 and rounded."""
    return tensor.is_cpu and not onednn_multiplies(tensor.dtype)


@cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a dtype by instructions of this CPU.

    bfloat16 needs AVX-512, float16 AVX-512 FP16 or AMX.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _blocks(length: int, others: int) -> list[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(1, others))
    return [slice(start, start + size) for start in range(0, length, size)]
