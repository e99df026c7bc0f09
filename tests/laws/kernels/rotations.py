"""Rotations as the law of kernels sees them: how exact results have to be."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.library import statistics_dtype
from megatron.ops.rotary import rotate_reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# [s, b, g, n, d], the rotating channels, and whether every sequence has angles of its own.
SHAPES = (
    ((0, 2, 3, 1, 8), 8, False),
    ((3, 1, 1, 1, 2), 2, False),
    ((2, 3, 1, 2, 5), 2, True),
    ((3, 2, 2, 3, 6), 0, True),
    ((5, 2, 3, 1, 64), 64, False),
    ((4, 3, 2, 4, 80), 20, True),
    ((7, 2, 1, 33, 130), 128, True),
    ((64, 2, 2, 3, 128), 128, False),
    ((0, 2, 3, 3, 8), 8, True),
    ((5, 2, 3, 6, 20), 12, True),
)
# Units in the last place of the dtype that is computed in: one for each product, one for the sum.
COMPUTED_ULPS = 3
KERNEL = torch.ops.megatron.rotate.default
SPLIT = torch.ops.megatron.split_rotated.default
JOIN = torch.ops.megatron.join_rotated.default


def draw(
    shape: tuple[int, ...], channels: int, own: bool, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads as a split of the projection leaves them, with strides, and tables of angles."""
    drawn = torch.Generator().manual_seed(seed)
    s, b, g, n, d = shape
    grouped = torch.randn((s, b, g, n + 2, d), generator=drawn, dtype=torch.float64)
    angles = 100 * torch.randn(
        (s, b if own else 1, 1, 1, channels // 2), generator=drawn, dtype=torch.float64
    )
    return grouped.to(dtype)[..., 1:-1, :], angles.cos().to(dtype), angles.sin().to(dtype)


def check(
    heads: Tensor, cos: Tensor, sin: Tensor, *, rotate: Callable[..., Tensor] = KERNEL
) -> None:
    """Rotate both ways, and check the results against the reference in fp64."""
    wide = (heads.double(), cos.double(), sin.double())
    half, computed = cos.shape[-1], torch.finfo(statistics_dtype(heads)).eps
    of_dtype = torch.finfo(heads.dtype)
    first, second = wide[0][..., :half].abs(), wide[0][..., half : 2 * half].abs()
    c, s = wide[1].abs(), wide[2].abs()
    scale = torch.cat((first * c + second * s, second * c + first * s), -1)
    for back in (False, True):
        made, expected = rotate(heads, cos, sin, back), rotate_reference(*wide, back)
        assert made.dtype == heads.dtype
        assert made.shape == heads.shape
        assert made.is_contiguous()
        assert torch.equal(made[..., 2 * half :], heads[..., 2 * half :])
        error = (made.double() - expected).abs()[..., : 2 * half]
        rounding = of_dtype.eps / 2 * expected.abs()[..., : 2 * half] + of_dtype.smallest_normal
        bound = rounding + COMPUTED_ULPS * computed * scale
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert (error <= bound).all(), f"{worst:.3g} times the error that is allowed"


def check_groups(
    grouped: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    split: Callable[..., tuple[Tensor, ...]] = SPLIT,
    join: Callable[..., Tensor] = JOIN,
) -> None:
    """Check that groups are split and joined with the bits of `rotate`, and values as they are."""
    count = grouped.shape[3] - 2
    for back in (False, True):
        expected = KERNEL(grouped, cos, sin, back)
        expected[..., count + 1 :, :] = grouped[..., count + 1 :, :]
        parts = split(grouped, cos, sin, back)
        for made, part in zip(parts, expected.split((count, 1, 1), 3), strict=True):
            assert made.is_contiguous()
            assert made._base is None
            assert torch.equal(made, part)
        joined = join(*grouped.split((count, 1, 1), 3), cos, sin, back)
        assert joined.is_contiguous()
        assert torch.equal(joined, expected)


def check_some() -> None:
    """Check all shapes in every dtype."""
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            heads, *tables = draw(*shape, dtype, seed=number)
            check(heads, *tables)
            if heads.shape[3] > 2:  # queries, a key and a value
                check_groups(heads, *tables)
