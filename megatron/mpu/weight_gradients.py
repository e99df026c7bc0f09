"""Gradients of weights: as products that add to a buffer directly, and later than at first.

A linear layer's backward pass calls `defer_or_compute` for the gradient of its weight. It gets it
at once, or nothing: where the weight has a `GradientSum`, the product has been added there; while a
queue is collecting (zero-bubble schedules), the product's inputs are kept and `compute` makes it
later. Everything else (biases, norms, embeddings) is never late.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.ops.cpu_products import is_widened, matrix_product

WeightProduct = Callable[[Tensor, Tensor], Tensor]
"""The gradient [out, in] of a weight, of the input [.., in] and the output's gradient [.., out]."""


# Half-precision products are added to an fp32 sum in blocks of so many elements. On a CPU they are
# then still in the cache.
_BLOCK_ELEMENTS = {"cpu": 2**21}
_BLOCK_ELEMENTS_ELSEWHERE = 2**28


class GradientSum:
    """The place in a buffer where the gradients of one weight add up over micro-batches.

    Products are added by the matrix product itself where it can. In place of a tensor of its own
    for each of them, which is then copied or added, this takes no memory and no pass of its own.

    Args:
        total: [out, in], in the dtype of the weight or wider. Its content is of no interest while
            `is_empty`.
        make_room: called before the first of it is written, where `total` may have no memory.
    """

    def __init__(self, total: Tensor, make_room: Callable[[], object] = lambda: None) -> None:
        self.total, self.is_empty = total, True
        self._make_room = make_room
        self._arrived: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Make sure that `total` can be written; call it before each addition."""
        if self.is_empty:
            self._make_room()

    def accept_products(self, weight: Tensor, *, arrived: Callable[[], object]) -> None:
        """Let layers add products for `weight`; `arrived` is called after one that was deferred."""
        weight.gradient_sum = self  # type: ignore[attr-defined]  # our own vocabulary
        self._arrived = arrived

    def add(self, gradient: Tensor) -> None:
        """Add a gradient [out, in]."""
        self.begin()
        self.total.copy_(gradient) if self.is_empty else self.total.add_(gradient)
        self.is_empty = False

    def add_product(self, rows_in: Tensor, rows_out: Tensor, product: WeightProduct) -> None:
        """Add the gradient of an input [.., in] and the gradient of an output [.., out]."""
        if product is not weight_gradient:  # as of 8-bit operands, which makes a tensor
            self.add(product(rows_in, rows_out))
            return
        self.begin()
        add_product(self.total, _rows(rows_out), _rows(rows_in), is_first=self.is_empty)
        self.is_empty = False

    def add_late_product(self, rows_in: Tensor, rows_out: Tensor, product: WeightProduct) -> None:
        """Do as `add_product` outside of a backward pass, in which autograd would call hooks."""
        self.add_product(rows_in, rows_out, product)
        self._arrived()


def gradient_sum(weight: Tensor) -> GradientSum | None:
    """Return where products for the gradient of `weight` are added; None: autograd has them."""
    return getattr(weight, "gradient_sum", None)


def alias_of(weight: Tensor) -> Tensor:
    """Return another tensor object of `weight`; the gradient of a product goes where its own does.

    A module that has hooks does not return its parameter itself.
    """
    alias = weight.view_as(weight)
    alias.gradient_sum = gradient_sum(weight)  # type: ignore[attr-defined]  # our own vocabulary
    return alias


def add_product(total: Tensor, rows_out: Tensor, rows_in: Tensor, *, is_first: bool) -> None:
    """Add rows_out^T rows_in to `total` [out, in]; the first product replaces its content.

    Half-precision products are added up in the dtype of `total`. In half precision a sum of many
    would lose the products that are small beside it, and round at every one.
    """
    beta = 0 if is_first else 1
    if total.dtype == rows_out.dtype and not is_widened(rows_out):
        torch.addmm(total, rows_out.t(), rows_in, beta=beta, out=total)
        return
    if total.is_cuda and total.dtype == torch.float32:  # cuBLAS adds before it rounds
        torch.addmm(total, rows_out.t(), rows_in, out_dtype=torch.float32, beta=beta, out=total)
        return
    for block in element_blocks(total):
        part = matrix_product(rows_out[:, block].t(), rows_in)
        if is_first:
            total[block].copy_(part)
        else:
            total[block].add_(part)


def element_blocks(total: Tensor, parts: int = 1) -> Iterator[slice]:
    """Yield the rows of `total` [n, m] in blocks that a cache holds; `parts` divides them again."""
    limit = _BLOCK_ELEMENTS.get(total.device.type, _BLOCK_ELEMENTS_ELSEWHERE) // parts
    size = max(1, limit // total.shape[1])
    for start in range(0, total.shape[0], size):
        yield slice(start, start + size)


class _Late(NamedTuple):
    weight: Tensor
    rows_in: Tensor  # [.., in]
    rows_out: Tensor  # [.., out], the gradient of the output
    product: WeightProduct


class WeightGradients:
    """The deferred weight-gradient products of one stage, by key.

    A parameter belongs to a queue by `adopt`, and to one at most.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[_Late]] = {}
        self._collecting: Hashable | None = None
        self._kept_now: set[Tensor] = set()  # weights of products kept while this is collecting

    def adopt(self, weights: Iterable[Tensor]) -> None:
        """Put this queue in charge of the gradients of `weights` while it is collecting.

        A weight that several layers use must not be among them: gradients that come in two parts
        are added in another order than those that come in one.
        """
        for weight in weights:
            weight.weight_gradients = self  # type: ignore[attr-defined]  # our own vocabulary

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Defer the gradients of adopted weights in a backward pass inside the block."""
        assert self._collecting is None  # noqa: S101  # invariant: backward passes do not nest
        assert key not in self._waiting, key  # noqa: S101  # invariant: one backward per key
        self._collecting = key
        self._waiting[key] = []
        try:
            yield
        finally:
            self._collecting = None
            self._kept_now.clear()

    def compute(self, key: Hashable) -> None:
        """Compute the products deferred under `key`, in their order, and remove them."""
        late = self._waiting.pop(key)
        late.reverse()
        while late:
            weight, rows_in, rows_out, product = late.pop()
            place = gradient_sum(weight)
            if place is None:
                torch.autograd.backward([weight], [product(rows_in, rows_out)])
            else:
                place.add_late_product(rows_in, rows_out, product)

    @property
    def size(self) -> int:
        """Number of products that are still to be computed."""
        return sum(len(late) for late in self._waiting.values())

    def takes(
        self, weight: Tensor, rows_in: Tensor, rows_out: Tensor, product: WeightProduct
    ) -> bool:
        """Defer a product while collecting; called by `defer_or_compute`."""
        if self._collecting is None:
            return False
        # Detached: an input would hold the graph that made it, and all that this has saved.
        late = _Late(weight, rows_in.detach(), rows_out.detach(), product)
        self._waiting[self._collecting].append(late)
        self._kept_now.add(weight)
        return True

    def has_kept(self, weight: Tensor) -> bool:
        """Return whether the gradient of `weight` is deferred in the present backward pass."""
        return weight in self._kept_now


def bypasses_autograd(weight: Tensor) -> bool:
    """Return whether a queue may keep back the gradient of `weight`, or it has a `GradientSum`."""
    return getattr(weight, "weight_gradients", None) is not None or gradient_sum(weight) is not None


def comes_later(weight: Tensor) -> bool:
    """Return whether the present backward pass has deferred the gradient of `weight`.

    Autograd calls hooks of a leaf also where a layer gave it no gradient; this distinguishes the
    cases.
    """
    queue: WeightGradients | None = getattr(weight, "weight_gradients", None)
    return queue is not None and queue.has_kept(weight)


def weight_gradient(rows_in: Tensor, rows_out: Tensor) -> Tensor:
    """Return the gradient [out, in] of a weight, from its input and the gradient of its output.

    For backward passes, in which autograd records nothing.
    """
    return matrix_product(_rows(rows_out).t(), _rows(rows_in))


def defer_or_compute(
    weight: Tensor, rows_in: Tensor, rows_out: Tensor, product: WeightProduct = weight_gradient
) -> Tensor | None:
    """Return the gradient [out, in] of `weight`, or None where it is deferred or added already.

    Args:
        weight: the parameter itself, not a view of it.
        rows_in: input of the layer, [.., in], whole.
        rows_out: gradient of its output, [.., out].
        product: what computes the gradient, without communication.
    """
    queue: WeightGradients | None = getattr(weight, "weight_gradients", None)
    if queue is not None and queue.takes(weight, rows_in, rows_out, product):
        return None
    place = gradient_sum(weight)
    if place is None:
        return product(rows_in, rows_out)
    place.add_product(rows_in, rows_out, product)
    return None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
