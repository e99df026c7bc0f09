"""Products of rows with weights that are stored in 8 bits, with one scale for each output.

Weights are rounded once; rows and products stay in their precision. On CPUs int8 is multiplied as
it is, by our kernel; everything else is converted for each product, which saves memory and costs
time. Bits do not depend on the number of rows where those of `row_products` do not.
"""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import library
from megatron.ops.packed_product import pack_weight, packed_product
from megatron.ops.row_products import RowProduct, is_offered, matrices_of

StoredFormat: TypeAlias = Literal["int8", "fp8"]
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16)


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
        values: the memory of the weight without its scales, of its shape, in the order of products.
        scales: [.., out].
        dense_bytes: what a product takes for a converted matrix.
    """

    def __init__(self, weight: Tensor, stored: StoredFormat) -> None:
        self.values, self.scales = quantized(weight, stored)
        self._scales = self.scales.view(-1, self.scales.shape[-1]).unbind(0)
        self._packed: tuple[Tensor, ...] | None = None
        self.dense_bytes = 0
        if _has_kernel(weight, stored):
            packed = torch.stack([pack_weight(each) for each in matrices_of(self.values)])
            self.values = packed.view(-1)[: weight.numel()].view(weight.shape)
            self._packed = packed.unbind(0)
        else:
            self._matrices = matrices_of(self.values)
            self.dense_bytes = self._matrices[0].numel() * weight.element_size()

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor:
        """Return [.., out] of rows [.., in]."""
        scales = self._scales[group]
        if rows.numel() == 0:
            return rows.new_empty((*rows.shape[:-1], len(scales)))
        if self._packed is not None:
            return packed_product(self._packed[group], len(scales), rows, bias, scales)
        flat, dense = rows.reshape(-1, rows.shape[-1]), self._matrices[group].to(rows.dtype)
        # One more would be kept: it is multiplied as it is.
        multiply = RowProduct(dense, pack=False) if is_offered(dense) else None
        product = F.linear(flat, dense) if multiply is None else multiply(flat)
        product = (product * scales).to(rows.dtype)
        if bias is not None:
            product = product + bias
        return product.view(*rows.shape[:-1], -1)


def _has_kernel(weight: Tensor, stored: StoredFormat) -> bool:
    return (
        stored == "int8"
        and library.INSTRUCTION_SET is not None
        and weight.device.type == "cpu"
        and weight.dtype in _KERNEL_DTYPES
    )
