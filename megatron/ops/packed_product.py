"""x W^T + b with a weight that was packed once, whose bits do not depend on the number of rows.

What a reader would get wrong: the layout of a packed weight is that of the instruction set of this
process, and packed weights are stored nowhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.library import operator, shapes_of


@operator("pack_weight(Tensor weight) -> Tensor")
def pack_weight_reference(weight: Tensor) -> Tensor:
    """Return a weight [out, in], as `packed_product` takes it: [n]."""
    return weight.flatten().clone()


@shapes_of("pack_weight")
def _pack_shapes(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.numel())


@operator(
    "packed_product(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int outputs) -> Tensor"
)
def packed_product_reference(
    x: Tensor, packed: Tensor, scales: Tensor | None, bias: Tensor | None, outputs: int
) -> Tensor:
    """Return x W^T s + b, [rows, out], in the dtype of weight or scales, summed in float32.

    Args:
        x: float32 [rows, in].
        packed: float32, bfloat16 or int8, of `pack_weight`.
        scales: [out] of int8, float32 or bfloat16; None for other weights.
        bias: [out], of the dtype of the product.
    """
    product = F.linear(x, packed.view(outputs, -1).to(x.dtype))
    if scales is not None:
        product = product * scales.to(x.dtype)
    if bias is not None:
        product = product + bias.to(x.dtype)
    return product.to(packed.dtype if scales is None else scales.dtype)


@shapes_of("packed_product")
def _product_shapes(
    x: Tensor, packed: Tensor, scales: Tensor | None, bias: Tensor | None, outputs: int
) -> Tensor:
    return (packed if scales is None else scales).new_empty((len(x), outputs))


def pack_weight(weight: Tensor) -> Tensor:
    """Return a contiguous weight [out, in], float32, bfloat16 or int8, in the order of kernels."""
    packed: Tensor = torch.ops.megatron.pack_weight(weight)
    return packed


def packed_product(
    packed: Tensor, outputs: int, x: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """Return x W^T s + b, [.., out], of x [.., in], in the dtype of weight or scales."""
    rows = x.reshape(-1, x.shape[-1]).float()
    product: Tensor = torch.ops.megatron.packed_product(rows, packed, scales, bias, outputs)
    return product.view(*x.shape[:-1], outputs)
