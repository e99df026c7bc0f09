"""Products of matrices on CPUs that PyTorch is slow on by itself.

Half precision without instructions for it: PyTorch multiplies element by element, which takes up to
a hundred times as long as in fp32. Here matrices are widened in blocks that a cache holds, and
results rounded once, as the instructions of other CPUs round.
fp32: PyTorch asks MKL, which reaches half of the rate of oneDNN on an AMD with AVX-512.
"""

from collections.abc import Callable, Mapping, Set
from functools import cache, partial

import torch
from torch import Tensor

from megatron import host, log

MKL, ONEDNN = "MKL", "oneDNN"
# PyTorch's switch for products in fp32. "bf16" has oneDNN multiply, and lets it round operands to
# bf16, as it does by AMX alone.
_FP32 = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch sets it at run time
_BY_ONEDNN, _NOT_SET = "bf16", "none"
# s h d, from which steps of models of 64 to 512 channels and 64 to 1024 tokens took less time.
_BREAK_EVEN = 2**20
# Rows, sums and columns: no multiples of vectors, and what several kernels of oneDNN are for.
_PROBED = ((1, 96, 48), (17, 33, 65), (128, 256, 192))
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


def cpu_features() -> Set[str]:
    """Return what instructions this CPU has, as torch names them; none where it does not tell."""
    capabilities: Callable[[], Mapping[str, object]]
    capabilities = getattr(torch.cpu, "get_capabilities", dict)
    return frozenset(name for name, value in capabilities().items() if value is True)


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


def fp32_library() -> str:
    """Return what multiplies matrices of fp32 on CPUs, on which the last bits depend."""
    return ONEDNN if _FP32.fp32_precision == _BY_ONEDNN else MKL


def take_faster_fp32_library(
    *, tokens: int, hidden_size: int, head_width: int
) -> Callable[[], None]:
    """Have oneDNN multiply fp32 matrices in this process if it is faster; return what undoes it.

    A precision that somebody has set is left alone. PyTorch multiplies by oneDNN only where that
    may round operands to bf16, so products are compared with exact ones first.

    Small models are left to MKL: oneDNN loses more with their products of attention than it gains
    with others.

    Args:
        tokens: of a sample on a rank, s.
        hidden_size: of the model, h.
        head_width: channels of a head of attention, d.
    """
    before = _FP32.fp32_precision
    undo = partial(setattr, _FP32, "fp32_precision", before)
    is_large = tokens * hidden_size * head_width >= _BREAK_EVEN
    if (
        before == _NOT_SET
        and is_large
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's
        and onednn_is_faster_in_fp32(host.processor_vendor(), cpu_features())
    ):
        _FP32.fp32_precision = _BY_ONEDNN
        if not fp32_products_are_exact():
            undo()
            log.warning(
                "oneDNN rounds operands of products in fp32 on this CPU, where it is not known to: "
                "MKL multiplies them, which is slower here"
            )
    return undo


def onednn_is_faster_in_fp32(vendor: str, features: Set[str]) -> bool:
    """Return whether oneDNN multiplies fp32 matrices by wider instructions than MKL, exactly."""
    may_round = "amx_tile" in features
    return vendor not in ("GenuineIntel", "") and "avx512_f" in features and not may_round


def fp32_products_are_exact() -> bool:
    """Return whether products keep all 24 bits of fp32: of whole numbers whose sums fit in them."""
    for n, k, m in _PROBED:
        wide = torch.arange(n * k).view(n, k) * 7919 % 16381  # of 14 bits: bf16 has 8, tf32 11
        signs = torch.arange(k * m).view(k, m) % 3 - 1
        exact = (wide @ signs).float()
        a, b = wide.float(), signs.float()
        # Each way round, and with the operands in the order of a gradient's.
        if not torch.equal(a @ b, exact) or not torch.equal((b.t() @ a.t()).t(), exact):
            return False
    return True


def _blocks(length: int, others: int) -> list[slice]:
    size = max(1, _BLOCK_ELEMENTS // max(1, others))
    return [slice(start, start + size) for start in range(0, length, size)]
