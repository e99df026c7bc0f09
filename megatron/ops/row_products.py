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
        self._inputs = own.shape[-1]
        self._outputs = own.shape[-2]
        self._matrices = [own] if own.dim() == 2 else list(own.unbind(0))
        if reorder:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self._matrices = [pack(each, _ROWS) for each in self._matrices]
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor:
        """Return [.., out] of rows [.., in], as `F.linear` with the weight of a group does."""
        count = rows.numel() // self._inputs
        if count == 0:
            return rows.new_empty((*rows.shape[:-1], self._outputs))
        outer, missing = rows.shape[:-1], padded_rows(count) - count
        if missing:
            rows = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        product: Tensor = self._multiply(rows, self._matrices[group], bias, "none", [], "")
        return product[:count].view(*outer, -1) if missing else product


def padded_rows(count: int) -> int:
    """Return how many rows are multiplied in place of `count`: less than an eighth more.

    oneDNN compiles kernels for each number of rows, in milliseconds, and keeps those of 1024
    shapes, of half a megabyte each: with a few numbers of rows it compiles and keeps few. One row
    alone would have other bits.
    """
    step = max(1, (1 << (count - 1).bit_length()) // 16)
    return max(2, -(-count // step) * step)


class RowProducts:
    """The products of some weights, each beside its weight."""

    def __init__(self, weights: Sequence[Tensor], products: Sequence[RowProduct]) -> None:
        self.weights, self.products = list(weights), list(products)
        self._states = _states(weights)

    def are_stale(self, weights: Iterable[Tensor]) -> bool:
        """Return whether `weights` are others than those that have products, or have changed.

        PyTorch counts the changes of a tensor in place, but for those of its `.data`.
        """
        return _states([each for each in weights if is_offered(each)]) != self._states


def is_offered(weight: Tensor) -> bool:
    """Return whether this build of PyTorch has such products for a weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _DTYPES
        and weight.dim() in (2, 3)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def row_products(weights: Iterable[Tensor], *, reorder: bool) -> RowProducts:
    """Return the products of those weights that have one."""
    offered = [weight for weight in weights if is_offered(weight)]
    return RowProducts(offered, [RowProduct(weight, reorder=reorder) for weight in offered])


def _states(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(weight.data_ptr(), weight._version) for weight in weights]


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, by the product that is in use for the weight if there is one."""
    product = product_in_use(weight)
    return F.linear(rows, weight, bias) if product is None else product(rows, bias)


def product_in_use(weight: Tensor) -> RowProduct | None:
    """Return the product that is in use for a weight."""
    return getattr(weight, "row_product", None)


@contextmanager
def in_use(products: RowProducts | None) -> Iterator[None]:
    """Use products in place of `F.linear` inside the block; None: use none."""
    weights = [] if products is None else products.weights
    for weight, product in zip(weights, [] if products is None else products.products):
        weight.row_product = product  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for weight in weights:
            del weight.row_product  # type: ignore[attr-defined]
