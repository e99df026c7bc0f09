"""Products of rows with a weight, whose bits do not depend on the number of rows.

PyTorch multiplies float32 on CPUs by MKL, which sums in other orders for 1, for few and for many
rows, and in further ones for several threads; oneDNN does so for one row alone. Weights can be
packed once, for our kernels or, without those, as oneDNN wants them: products of few rows then take
half of the time or less. Products are used in forward only, while they are `in_use`: a packed
weight is a copy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import library
from megatron.ops.cpu_memory import CopiesInLargePages
from megatron.ops.cpu_products import is_widened, matrix_product, onednn_multiplies
from megatron.ops.packed_product import pack_weight, packed_product

_DTYPES = (torch.float32, torch.bfloat16)
_ROWS = 8  # that oneDNN packs weights for; others give the same bits


Multiply = Callable[[Tensor, Tensor | None], Tensor]
"""Returns x W^T + b of rows [.., in], of one at least."""


class RowProduct:
    """x W^T + b for a weight [out, in], or for each of several, [groups, out, in].

    Args:
        pack: copy the weight in the order that products want; else oneDNN does in each call.
        pages: where such copies are.
    """

    def __init__(
        self, weight: Tensor, *, pack: bool, pages: CopiesInLargePages | None = None
    ) -> None:
        self._weight, self._outputs = weight, weight.shape[-2]
        self.packed: list[Multiply] | None = None
        if pack:
            pages = pages or CopiesInLargePages()
            self.packed = [_product_with(each, pages) for each in matrices_of(weight)]

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor:
        """Return [.., out] of rows [.., in], as `F.linear` with the weight of a group does."""
        if rows.numel() == 0:
            return rows.new_empty((*rows.shape[:-1], self._outputs))
        if self.packed is not None:
            return self.packed[group](rows, bias)
        # Looked at in every call: a weight that is offloaded is in other memory each time.
        return _by_onednn(matrices_of(self._weight)[group], rows, bias)


def matrices_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the matrix [out, in] of a weight, or those of several, [groups, out, in]."""
    own = weight.detach()
    return (own,) if own.dim() == 2 else own.unbind(0)


def _product_with(weight: Tensor, pages: CopiesInLargePages) -> Multiply:
    if library.INSTRUCTION_SET is None:
        if onednn_multiplies(weight.dtype):
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        return partial(_by_onednn, weight)
    packed = pages.keep(pack_weight(weight.contiguous()))
    return partial(packed_product, packed, len(weight))


def _by_onednn(weight: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    if not onednn_multiplies(weight.dtype):
        # PyTorch sums each output in one order then, however many rows there are.
        return F.linear(rows, weight, bias)
    outer, count = rows.shape[:-1], rows.numel() // rows.shape[-1]
    if missing := padded_rows(count) - count:
        rows = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
    multiply = torch.ops.mkldnn._linear_pointwise.default
    product: Tensor = multiply(rows, weight, bias, "none", [], "")
    return product[:count].view(*outer, -1) if missing else product


def padded_rows(count: int) -> int:
    """Return how many rows oneDNN multiplies in place of `count`: less than an eighth more.

    It compiles kernels for each number of rows, in milliseconds, and keeps those of 1024
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


def row_products(weights: Iterable[Tensor], *, pack: bool) -> RowProducts:
    """Return the products of those weights that have one."""
    offered = [weight for weight in weights if is_offered(weight)]
    pages = CopiesInLargePages()
    return RowProducts(offered, [RowProduct(each, pack=pack, pages=pages) for each in offered])


def _states(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(weight.data_ptr(), weight._version) for weight in weights]


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`, by the product that is in use for the weight if there is one."""
    own = product_in_use(weight)
    if own is not None:
        return own(rows, bias)
    if is_widened(rows) and not torch.is_grad_enabled():
        flat = matrix_product(rows.reshape(-1, rows.shape[-1]), weight.t(), bias)
        return flat.view(*rows.shape[:-1], weight.shape[0])
    return F.linear(rows, weight, bias)


class LinearProduct(Protocol):
    """What multiplies rows by a weight in place of `F.linear`."""

    def __call__(self, rows: Tensor, bias: Tensor | None = None, *, group: int = 0) -> Tensor: ...


def product_in_use(weight: Tensor) -> LinearProduct | None:
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
