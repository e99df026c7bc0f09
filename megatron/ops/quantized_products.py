"""Products of rows with weights that are stored in 8 bits, with one scale for each output.

Weights are rounded once; rows and products stay in their precision. In bfloat16 on CPUs int8 is
multiplied as it is, by a kernel of PyTorch; everything else is converted for each product, which
saves memory and costs time. Bits do not depend on the number of rows where those of `row_products`
do not.
"""

from functools import cache
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.row_products import RowProduct, is_offered

StoredFormat: TypeAlias = Literal["int8", "fp8"]
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
# The kernel reads so many inputs at a time, behind the end of the memory where there are fewer.
_KERNEL_INPUTS = 16
_KERNEL_CLOSE = 0.02  # of products in bfloat16, whose sums are in float32


def quantized(weight: Tensor, stored: StoredFormat) -> tuple[Tensor, Tensor]:
    """Return values [.., out, in] in 8 bits, and scales [.., out] in the dtype of the weight.

    Values times scales are the weight, symmetric and to the nearest. Scales of float16 are float32.
    They are off by 2^-9 of themselves at most, which carries no value beyond the largest one.
    """
    wide = weight.detach().float()
    dtype = torch.float32 if weight.dtype is torch.float16 else weight.dtype
    exact = wide.abs().amax(dim=-1) / _LARGEST[stored]
    scales = exact.clamp(min=torch.finfo(torch.float32).tiny).to(dtype)  # of a row of zeros
    values = wide / scales.float().unsqueeze(-1)
    if stored == "int8":
        values = values.round()
    return values.to(_DTYPES[stored]), scales


class QuantizedProduct:
    """x W^T + b for a weight [out, in], or for each of several, [groups, out, in], in 8 bits.

    Attributes:
        values: the weight without its scales.
        scales: [.., out].
        dense_bytes: what a product takes for a converted matrix.
    """

    def __init__(self, weight: Tensor, stored: StoredFormat) -> None:
        self.values, self.scales = quantized(weight, stored)
        is_one = weight.dim() == 2
        self._matrices = [self.values] if is_one else list(self.values.unbind(0))
        self._scales = [self.scales] if is_one else list(self.scales.unbind(0))
        self._uses_kernel = (
            stored == "int8"
            and weight.device.type == "cpu"
            and weight.dtype is torch.bfloat16
            and weight.shape[-1] % _KERNEL_INPUTS == 0
            and has_int8_kernel()
        )
        self.dense_bytes = 0
        if not self._uses_kernel:
            self.dense_bytes = self._matrices[0].numel() * weight.element_size()

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor:
        """Return [.., out] of rows [.., in]."""
        values, scales = self._matrices[group], self._scales[group]
        flat = rows.reshape(-1, rows.shape[-1])
        if len(flat) == 0:
            return rows.new_empty((*rows.shape[:-1], len(scales)))
        if self._uses_kernel:
            product = torch._weight_int8pack_mm(flat.contiguous(), values, scales)
        else:
            dense = values.to(rows.dtype)
            # One more would be kept: it is multiplied as it is.
            multiply = RowProduct(dense, reorder=False) if is_offered(dense) else None
            product = F.linear(flat, dense) if multiply is None else multiply(flat)
            product = (product * scales).to(rows.dtype)
        if bias is not None:
            product = product + bias
        return product.view(*rows.shape[:-1], -1)


@cache
def has_int8_kernel() -> bool:
    """Return whether this build of PyTorch multiplies bfloat16 by int8, as a small product shows.

    Its name is private, so it may change or be gone.
    """
    kernel = getattr(torch, "_weight_int8pack_mm", None)
    if kernel is None:
        return False
    values = (torch.arange(16 * 32) % 251 - 125).view(16, 32).to(torch.int8)
    rows = torch.linspace(-1.0, 1.0, 5 * 32).view(5, 32).to(torch.bfloat16)
    scales = torch.linspace(0.5, 2.0, 16).to(torch.bfloat16)
    try:
        found = kernel(rows, values, scales).float()
    except (RuntimeError, TypeError):
        return False
    expected = F.linear(rows.float(), values.float()) * scales.float()
    return bool((found - expected).abs().max() <= _KERNEL_CLOSE * expected.abs().max())
