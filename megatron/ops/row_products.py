"""Products of rows with a weight by oneDNN, whose bits do not depend on the number of rows.

PyTorch multiplies float32 on CPUs by MKL, which sums in other orders for 1, for few and for many
rows, and in further ones for several threads; oneDNN does so for one row alone. Weights can be
reordered once, as oneDNN wants them: products of few rows then take half of the time. Products are
used in forward only, while they are `in_use`: a reordered weight is a copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 8  # that weights are reordered for; others give the same bits


class RowProduct:
    """x W^T + b for a weight [out, in], or for each of several, [groups, out, in].

    Args:
        reorder: copy the weight in the order of oneDNN; else each call does.
    """

    def __init__(self, weight: Tensor, *, reorder: bool) -> None:
        own = weight.detach()
        self._outputs = own.shape[-2]
        self._matrices = [own] if own.dim() == 2 else list(own.unbind(0))
        if reorder:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self._matrices = [pack(each, _ROWS) for each in self._matrices]

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor:
        """Return [.., out] of rows [.., in], as `F.linear` with the weight of a group does."""
        flat = rows.reshape(-1, rows.shape[-1])
        count = len(flat)
        if count == 0:
            return rows.new_empty((*rows.shape[:-1], self._outputs))
        if count == 1:
            flat = F.pad(flat, (0, 0, 0, 1))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            flat, self._matrices[group], bias, "none", [], ""
        )
        return product[:count].view(*rows.shape[:-1], -1)


def is_offered(weight: Tensor) -> bool:
    """Return whether this build of PyTorch has such products for a weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.dim() in (2, 3)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def row_products(weights: Iterable[Tensor], *, reorder: bool) -> list[tuple[Tensor, RowProduct]]:
    """Return the products of those weights that have one, each beside its weight."""
    return [
        (weight, RowProduct(weight, reorder=reorder)) for weight in weights if is_offered(weight)
    ]


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, by the product that is in use for the weight if there is one."""
    product = product_in_use(weight)
    return F.linear(rows, weight, bias) if product is None else product(rows, bias)


def product_in_use(weight: Tensor) -> RowProduct | None:
    """Return the product that is in use for a weight."""
    return getattr(weight, "row_product", None)


@contextmanager
def in_use(products: Sequence[tuple[Tensor, RowProduct]]) -> Iterator[None]:
    """Use products in place of `F.linear` inside the block, on this thread's weights."""
    for weight, product in products:
        weight.row_product = product  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for weight, _ in products:
            del weight.row_product  # type: ignore[attr-defined]
