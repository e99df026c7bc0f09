"""Rotation of channels of heads by position, in one pass each way.

Channel i of the first half of the rotating channels is paired with channel i of the second. The
gradient is the rotation by the opposite angle, so that nothing is saved but the tables of angles.
Everything is computed in fp32 (fp64 of fp64) and rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.ops.library import gradient_of, operator, shapes_of, statistics_dtype


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `heads` with their first channels rotated, contiguous.

    Args:
        heads: [s, b, g, n, d]; with neighbouring channels, any other strides cost no copy.
        cos: [s, 1 or b, 1, 1, r/2] in the dtype of `heads`, where r channels of d rotate.
        sin: as `cos`.

    Raises:
        ValueError: the tables fit the heads in neither shape nor dtype.
    """
    _check(heads, cos, sin)
    out: Tensor = torch.ops.megatron.rotate(heads, cos, sin, False)
    return out


def split_rotated(grouped: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, rotated as by `rotate`, and values of every group, all contiguous.

    None of them is a view: what `grouped` takes is free where nothing else holds it. The gradient
    is written in its place in that of `grouped`, in one pass.

    Args:
        grouped: [s, b, g, n + 2, d]: n queries, a key and a value of each group of heads.
        cos: as for `rotate`.
        sin: as `cos`.

    Returns:
        [s, b, g, n, d]; [s, b, g, 1, d]; [s, b, g, 1, d].

    Raises:
        ValueError: as `rotate`, or a group has fewer than three heads.
    """
    _check(grouped, cos, sin)
    if grouped.shape[3] < 3:
        raise ValueError(
            "a group of heads lacks queries, a key or a value\n"
            f"  found: {tuple(grouped.shape)}\n"
            "  fix: give [s, b, g, queries + 2, d]"
        )
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.megatron.split_rotated(grouped, cos, sin, False)
    return out


def _check(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    fits = (
        heads.dim() == cos.dim() == 5
        and cos.shape[:4] in [(heads.shape[0], rows, 1, 1) for rows in (1, heads.shape[1])]
        and 2 * cos.shape[4] <= heads.shape[4]
        and sin.shape == cos.shape
        and heads.dtype == cos.dtype == sin.dtype
    )
    if not fits:
        raise ValueError(
            "tables of angles do not fit the heads\n"
            f"  found: heads {tuple(heads.shape)} {heads.dtype}; "
            f"cos {tuple(cos.shape)} {cos.dtype}; sin {tuple(sin.shape)} {sin.dtype}\n"
            "  fix: give heads [s, b, g, n, d], tables [s, 1 or b, 1, 1, up to d / 2], of one dtype"
        )


@operator("rotate(Tensor heads, Tensor cos, Tensor sin, bool back) -> Tensor")
def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return the rotation, by the opposite angles where `back`."""
    wide = heads.to(statistics_dtype(heads))
    half = cos.shape[-1]
    first, second, kept = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    sin = -sin if back else sin
    turned = (first * cos - second * sin, second * cos + first * sin, kept)
    return torch.cat(turned, dim=-1).to(heads.dtype)


@operator(
    "split_rotated(Tensor grouped, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor, Tensor)"
)
def split_rotated_reference(
    grouped: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values, by the opposite angles where `back`."""
    queries, keys = (
        rotate_reference(heads, cos, sin, back)
        for heads in (grouped[..., :-2, :], grouped[..., -2:-1, :])
    )
    return queries, keys, grouped[..., -1:, :].clone(memory_format=torch.contiguous_format)


@operator(
    "join_rotated(Tensor queries, Tensor keys, Tensor values, Tensor cos, Tensor sin, bool back)"
    " -> Tensor"
)
def join_rotated_reference(
    queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> Tensor:
    """Return groups [s, b, g, n + 2, d] of rotated queries, rotated keys and values."""
    turned = (rotate_reference(heads, cos, sin, back) for heads in (queries, keys))
    return torch.cat((*turned, values), dim=3)


@shapes_of("rotate")
def _shapes(heads: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return heads.new_empty(heads.shape)


@shapes_of("split_rotated")
def _shapes_of_parts(
    grouped: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    *rows, heads, width = grouped.shape
    queries, keys, values = (grouped.new_empty(*rows, n, width) for n in (heads - 2, 1, 1))
    return queries, keys, values


@shapes_of("join_rotated")
def _shapes_of_groups(
    queries: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> Tensor:
    *rows, heads, width = queries.shape
    return queries.new_empty(*rows, heads + 2, width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return torch.ops.megatron.rotate(grad, cos, sin, not ctx.back), None, None, None


def _backward_of_parts(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return torch.ops.megatron.join_rotated(*grads, cos, sin, not ctx.back), None, None, None


def _backward_of_groups(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    parts = torch.ops.megatron.split_rotated(grad, cos, sin, not ctx.back)
    return *parts, None, None, None


gradient_of("rotate", _backward, _save)
gradient_of("split_rotated", _backward_of_parts, _save)
gradient_of("join_rotated", _backward_of_groups, _save)
