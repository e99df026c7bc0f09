"""Rotation of channels of heads by position, in one pass each way.

The gradient is the rotation by the opposite angle, so that nothing is saved but the tables of
angles. Everything is computed in fp32 (fp64 of fp64) and rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.ops.library import gradient_of, operator, shapes_of, statistics_dtype


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `heads` with their first channels rotated, contiguous.

    Channel i of the first half of the rotating channels is paired with channel i of the second.

    Args:
        heads: [s, b, g, n, d]; with neighbouring channels, any other strides cost no copy.
        cos: [s, 1 or b, 1, 1, r/2] in the dtype of `heads`, where r channels of d rotate.
        sin: as `cos`.

    Raises:
        ValueError: the tables fit the heads in neither shape nor dtype.
    """
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
    out: Tensor = torch.ops.megatron.rotate(heads, cos, sin, False)
    return out


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


@shapes_of("rotate")
def _shapes(heads: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return heads.new_empty(heads.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return torch.ops.megatron.rotate(grad, cos, sin, not ctx.back), None, None, None


gradient_of("rotate", _backward, _save)
