"""Gradients of weights that are computed later than those of their inputs (zero-bubble schedules).

A linear layer's backward pass calls `defer_or_compute` for the gradient of its weight. Usually it
gets it at once. While a queue is collecting it gets nothing: the product's inputs are kept, and
`compute` makes it later and passes it to autograd as a gradient of the leaf, so that gradient
buffers work as always. Everything else (biases, norms, embeddings) is never late.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

WeightProduct = Callable[[Tensor, Tensor], Tensor]
"""The gradient [out, in] of a weight, of the input [.., in] and the output's gradient [.., out]."""


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
            torch.autograd.backward([weight], [product(rows_in, rows_out)])

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


def is_deferrable(weight: Tensor) -> bool:
    """Return whether a queue may keep back the gradient of `weight`."""
    return getattr(weight, "weight_gradients", None) is not None


def comes_later(weight: Tensor) -> bool:
    """Return whether the present backward pass has deferred the gradient of `weight`.

    Autograd calls hooks of a leaf also where a layer gave it no gradient; this distinguishes the
    cases.
    """
    queue: WeightGradients | None = getattr(weight, "weight_gradients", None)
    return queue is not None and queue.has_kept(weight)


@torch.no_grad()
def weight_gradient(rows_in: Tensor, rows_out: Tensor) -> Tensor:
    """Return the gradient [out, in] of a weight, from its input and the gradient of its output."""
    return _rows(rows_out).t().matmul(_rows(rows_in))


@torch.no_grad()
def defer_or_compute(
    weight: Tensor, rows_in: Tensor, rows_out: Tensor, product: WeightProduct = weight_gradient
) -> Tensor | None:
    """Return the gradient [out, in] of `weight`, or None when it is deferred.

    Args:
        weight: the parameter itself, not a view of it.
        rows_in: input of the layer, [.., in], whole.
        rows_out: gradient of its output, [.., out].
        product: what computes the gradient, without communication.
    """
    queue: WeightGradients | None = getattr(weight, "weight_gradients", None)
    if queue is not None and queue.takes(weight, rows_in, rows_out, product):
        return None
    return product(rows_in, rows_out)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
