"""Dropout as the law of kernels sees it: the same mask, and how exact results have to be."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.dropout import is_kept
from megatron.ops.library import statistics_dtype

# Of x, and of the residual.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
)
# The last is a row. Quarters are a fourth of it, rounded up to 16: whole ones, a last one that is
# shorter, and rows that fill one, two or three of them.
SHAPES = (
    (0,),
    (1,),
    (3, 16),
    (3, 33),
    (2, 20),
    (2, 64),
    (5, 613),
    (4095,),
    (2, 4096),
    (3, 4, 1031),
)
PROBABILITY = 0.3
# Units in the last place of the dtype that is computed in: the factor, the product, the sum.
COMPUTED_ULPS = 3
KERNEL = torch.ops.megatron.dropout_add.default


def draw(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, a residual, a seed for the mask and numbers of rows, which have both words."""
    drawn = torch.Generator().manual_seed(seed)
    x, residual = torch.randn((2, *shape), generator=drawn, dtype=torch.float64)
    of_mask = torch.empty((), dtype=torch.int64).random_(generator=drawn)
    rows = x.numel() // max(shape[-1], 1) if shape else 1
    numbers = torch.empty(rows, dtype=torch.int64).random_(generator=drawn)
    return x.to(dtypes[0]), residual.to(dtypes[1]), of_mask, numbers


def check(
    x: Tensor,
    residual: Tensor,
    seed: Tensor,
    numbers: Tensor,
    *,
    probability: float = PROBABILITY,
    dropout: Callable[..., Tensor] = KERNEL,
) -> None:
    """Drop with and without the residual, and check the results against fp64."""
    width = x.numel() // max(numbers.numel(), 1)
    kept = is_kept(width, probability, seed, numbers).view(x.shape)
    scaled = x.double() * kept / (1 - probability)
    computed = torch.finfo(statistics_dtype(x)).eps
    for added in (None, residual):
        made = dropout(x, added, probability, seed, numbers)
        assert made.dtype == (x if added is None else added).dtype
        assert made.shape == x.shape
        assert made.is_contiguous()
        other = torch.zeros_like(scaled) if added is None else added.double()
        expected, of_dtype = other + scaled, torch.finfo(made.dtype)
        rounding = of_dtype.eps / 2 * expected.abs() + of_dtype.smallest_normal
        bound = rounding + COMPUTED_ULPS * computed * (other.abs() + scaled.abs())
        error = (made.double() - expected).abs()
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert (error <= bound).all(), f"{worst:.3g} times the error that is allowed"


def check_some() -> None:
    """Check all shapes in every dtype."""
    for dtypes in DTYPES:
        for number, shape in enumerate(SHAPES):
            check(*draw(shape, dtypes, seed=number))
