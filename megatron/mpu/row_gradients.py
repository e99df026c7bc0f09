"""Gradients of a table as the few rows that were looked up, in place of a dense tensor.

A dense gradient is zeroed, written, and added to another one that is as large: with a tied table
to that of the projection, which waits for it through the whole backward pass. Who keeps gradients
in a buffer of its own calls `collect_rows` for its parameters, and adds the rows in their hooks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu.autograd import FunctionContext


class RowGradients:
    """The gradients of rows that wait to be added to the gradient of their table [v, h]."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []  # ids [n], gradients [n, h]

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Keep the gradients `rows` [.., h] of the rows `ids` [..]; an id may be there twice."""
        self._waiting.append((ids.reshape(-1), rows.reshape(-1, rows.shape[-1])))

    def add_to(self, total: Tensor) -> None:
        """Add all rows to `total` [v, h], in its dtype and in their order, and forget them."""
        for ids, rows in self._waiting:
            if total.is_cpu:
                total.index_add_(0, ids, rows.to(total.dtype))
            else:  # on a GPU index_add_ adds in no certain order
                total.index_put_((ids,), rows.to(total.dtype), accumulate=True)
        self._waiting.clear()


def collect_rows(table: Tensor) -> RowGradients:
    """Keep the gradients of rows of `table` back from autograd, for the caller to add.

    Autograd still calls the hooks of `table`, in a backward pass without other gradients for it
    with none.
    """
    rows = RowGradients()
    table.row_gradients = rows  # type: ignore[attr-defined]  # our own vocabulary
    return rows


def lookup(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows [.., h] of the parameter `table` [v, h] at int64 `ids` [..]."""
    function: Callable[..., Tensor] = _Lookup.apply
    return function(ids, table)


class _LookupContext(FunctionContext):
    table: Tensor


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _LookupContext, ids: Tensor, table: Tensor) -> Tensor:
        ctx.table = table  # itself: what autograd saves would be another object
        ctx.save_for_backward(ids)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _LookupContext, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        rows: RowGradients | None = getattr(ctx.table, "row_gradients", None)
        if rows is not None:
            rows.add(ids, grad)
            return None, None
        height = ctx.table.shape[0]
        dense: Tensor = torch.ops.aten.embedding_dense_backward(grad, ids, height, -1, False)
        return None, dense
