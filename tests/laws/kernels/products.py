"""Products with a packed weight as the law of kernels sees them."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.ops.packed_product import packed_product_reference

DTYPES = (torch.float32, torch.bfloat16)
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Rows, a weight, scales and a bias."""
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


def draw(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    in_int8: bool = False,
) -> Operands:
    """Return rows in float32 that are numbers of `dtype`, and the other operands."""
    random = torch.Generator().manual_seed(seed)
    x, weight, scales, bias = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,), (outputs,))
    )
    if not in_int8:
        return x.float(), weight, None, bias
    values = torch.randint(-128, 128, (outputs, inputs), generator=random, dtype=torch.int8)
    return x.float(), values, scales, bias


def check(operands: Operands, *, kernel: Callable[..., Tensor] = KERNEL) -> None:
    """Check the product against that in fp64: one rounding in fp32 for each term of the sum."""
    x, weight, scales, bias = operands
    outputs, terms = len(weight), weight.shape[1] + 2
    found = kernel(x, PACK(weight), scales, bias, outputs)
    wide = [None if t is None else t.double() for t in (x, weight.flatten(), scales, bias)]
    expected = packed_product_reference(*wide, outputs)
    size = packed_product_reference(*(None if t is None else t.abs() for t in wide), outputs)
    computed = terms * torch.finfo(torch.float32).eps * size
    rounded = torch.finfo(found.dtype).eps / 2 * expected.abs()
    error = (found.double() - expected).abs()
    assert found.dtype == (weight if scales is None else scales).dtype
    assert (error <= computed + rounded).all(), f"{error.max():.3g}"


def check_rows(operands: Operands) -> None:
    """Check that rows have the same bits alone and in any part of the others."""
    x, weight, *others = operands
    packed = PACK(weight)
    whole = KERNEL(x, packed, *others, len(weight))
    for count in (1, 2, 3, 5, 7, 8, 9):
        for first in range(0, len(x) - count + 1, 3):
            part = KERNEL(x[first : first + count], packed, *others, len(weight))
            assert torch.equal(part, whole[first : first + count]), (first, count)


def check_some() -> None:
    """Check all shapes in every dtype, with and without a bias."""
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            for in_int8 in (False, True):
                operands = draw(*shape, dtype, seed=number, in_int8=in_int8)
                check(operands)
                check((*operands[:3], None))
                check_rows(operands)
