"""The softmax inside the gradient of attention as the law of kernels sees it."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.attention import attention_gradient_reference
from megatron.ops.library import statistics_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# heads, rows, keys, the first position, queries of one position, causal
SHAPES = (
    (0, 3, 4, 0, 1, True),
    (2, 0, 4, 0, 1, True),
    (1, 1, 1, 0, 1, False),
    (2, 7, 7, 0, 1, True),
    (3, 12, 9, 5, 3, True),
    (2, 5, 33, 40, 1, True),
    (1, 64, 130, 66, 2, False),
    (2, 130, 130, 0, 1, True),
)
# Units in the last place of the dtype that is computed in, of each factor and of the exponential.
COMPUTED_ULPS = 8
KERNEL = torch.ops.megatron.attention_gradient_.default


def draw(heads: int, rows: int, keys: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Return scores that are mostly far below zero, and slopes."""
    drawn = torch.Generator().manual_seed(seed)
    scores = -8 * torch.rand((heads, rows, keys), generator=drawn, dtype=torch.float64).square()
    slopes = torch.randn((heads, rows, keys), generator=drawn, dtype=torch.float64)
    return (8 * scores).to(dtype), slopes.to(dtype)


def check(
    scores: Tensor,
    slopes: Tensor,
    first: int,
    queries: int,
    causal: bool,
    *,
    kernel: Callable[..., None] = KERNEL,
) -> None:
    """Compute in place, and check the results against the reference in fp64."""
    scale = 0.125
    wide, made = (scores.double(), slopes.double()), (scores.clone(), slopes.clone())
    # The rounding of the exponent grows with it.
    exponent = 1 + (scale * wide[0]).abs()
    attention_gradient_reference(*wide, scale, first, queries, causal)
    kernel(*made, scale, first, queries, causal)
    computed = COMPUTED_ULPS * torch.finfo(statistics_dtype(scores)).eps * exponent
    rounded = torch.finfo(scores.dtype).eps / 2
    for found, expected in zip(made, wide):
        error = (found.double() - expected).abs()
        bound = (rounded + computed) * expected.abs() + torch.finfo(scores.dtype).smallest_normal
        worst = (error / bound).max().item() if error.numel() else 0.0
        assert (error <= bound).all(), f"{worst:.3g} times the error that is allowed"
        assert ((found == 0) >= (expected == 0)).all(), "what a row does not see is zero"


def check_some() -> None:
    """Check all shapes in every dtype."""
    for dtype in DTYPES:
        for number, (heads, rows, keys, first, queries, causal) in enumerate(SHAPES):
            check(*draw(heads, rows, keys, dtype, seed=number), first, queries, causal)
