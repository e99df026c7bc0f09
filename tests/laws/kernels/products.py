"""Products with a packed weight as the law of kernels sees them."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.packed_product import packed_product_reference

DTYPES = (torch.float32, torch.bfloat16)
# rows, inputs, outputs; panels are of 8, 16 or 48 outputs, rows are taken 4, 6 or 8 at a time
SHAPES = (
    (0, 3, 5),
    (1, 1, 1),
    (1, 64, 48),
    (2, 7, 49),
    (5, 33, 8),
    (8, 16, 96),
    (13, 129, 50),
    (31, 40, 17),
    (70, 1, 200),
)
PACK = torch.ops.megatron.pack_weight.default
KERNEL = torch.ops.megatron.packed_product.default


def draw(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return rows in float32 that are numbers of `dtype`, a weight and a bias."""
    random = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    return [x.float(), weight, bias]


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, kernel: Callable[..., Tensor] = KERNEL
) -> None:
    """Check the product against that in fp64: one rounding in fp32 for each term of the sum."""
    outputs, terms = len(weight), weight.shape[1] + 1
    found = kernel(x, PACK(weight), bias, outputs)
    wide = [None if t is None else t.double() for t in (weight.flatten(), bias)]
    expected = packed_product_reference(x.double(), wide[0], wide[1], outputs)
    size = packed_product_reference(
        x.double().abs(), wide[0].abs(), None if wide[1] is None else wide[1].abs(), outputs
    )
    computed = terms * torch.finfo(torch.float32).eps * size
    rounded = torch.finfo(weight.dtype).eps / 2 * expected.abs()
    error = (found.double() - expected).abs()
    assert found.dtype == weight.dtype
    assert (error <= computed + rounded).all(), f"{error.max():.3g}"


def check_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that rows have the same bits alone and in any part of the others."""
    packed = PACK(weight)
    whole = KERNEL(x, packed, bias, len(weight))
    for count in (1, 2, 3, 5, 7, 8, 9):
        for first in range(0, len(x) - count + 1, 3):
            part = KERNEL(x[first : first + count], packed, bias, len(weight))
            assert torch.equal(part, whole[first : first + count]), (first, count)


def check_some() -> None:
    """Check all shapes in every dtype, with and without a bias."""
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            x, weight, bias = draw(*shape, dtype, seed=number)
            check(x, weight, bias)
            check(x, weight, None)
            check_rows(x, weight, bias)
