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


@operator("packed_product(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
def packed_product_reference(
    x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int
) -> Tensor:
    """Return x W^T + b, [rows, out], in the dtype of the weight, summed in float32.

    Args:
        x: float32 [rows, in].
        packed: float32 or bfloat16, of `pack_weight`.
        bias: [out], of the dtype of the weight.
    """
    wide = None if bias is None else bias.to(x.dtype)
    return F.linear(x, packed.view(outputs, -1).to(x.dtype), wide).to(packed.dtype)


@shapes_of("packed_product")
def _product_shapes(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return packed.new_empty((len(x), outputs))


def pack_weight(weight: Tensor) -> Tensor:
    """Return a contiguous weight [out, in], float32 or bfloat16, in the order of the kernels."""
    packed: Tensor = torch.ops.megatron.pack_weight(weight)
    return packed


def packed_product(packed: Tensor, outputs: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, [.., out], of x [.., in], in the dtype of the weight."""
    rows = x.reshape(-1, x.shape[-1])
    product: Tensor = torch.ops.megatron.packed_product(rows.float(), packed, bias, outputs)
    return product.view(*x.shape[:-1], outputs)
