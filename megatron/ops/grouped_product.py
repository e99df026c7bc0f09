"""Products of groups of rows with a matrix of each group, as one operator of PyTorch.

It reads the sizes of groups on the device, so that the host need not know them. On a GPU it is one
kernel in bfloat16; on a CPU one loop in C++, which gives the bits of `grouped_product_reference`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ALIGNMENT = 16  # bytes, of what a step along any dimension but the last takes


def is_served(rows: Tensor, weights: Tensor) -> bool:
    """Return whether `grouped_product` takes rows and weights of this kind.

    A GPU has a kernel for bfloat16 alone, and would compute the others group by group as well.
    Tensors without values are taken to be a GPU's.
    """
    dtypes = _DTYPES if rows.device.type == "cpu" else {torch.bfloat16}
    return (
        rows.dtype == weights.dtype
        and rows.dtype in dtypes
        and not any(size * rows.itemsize % _ALIGNMENT for size in weights.shape[1:])
    )


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return [n, out]: rows [n, in] of group g, which follow those before, times weights[g]^T.

    Args:
        rows: contiguous.
        weights: [groups, out, in].
        counts: [groups], on the device of the rows; they sum up to n.
    """
    ends = counts.cumsum(0).to(torch.int32)
    product: Tensor = F.grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=ends)
    return product


def grouped_product_reference(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the same, of any kind of tensors, group by group."""
    # Unbound at once: taken one by one, each would have a gradient of the size of all.
    groups = zip(torch.split(rows, list(counts)), weights.unbind(0))
    return torch.cat([F.linear(group, weight) for group, weight in groups])
