"""The product a b^T of two quantised matrices: FP8 operands, sums in fp32, one rounding.

On CUDA it is torch's `scaled_mm`. Elsewhere, and for float64, the same sums are computed of the
same codes by an ordinary product: codes are exact in fp32, their products too, and every block's
sum is multiplied by both scales. `scaled_mm` adds in another order, so results agree within the
rounding of its sums.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.quantize import Blocks, Quantized, dequantize

NATIVE, EMULATED = "scaled_mm", "emulated"
_RECIPES = {
    Blocks.TENSOR: "TensorWise",
    Blocks.ROW: "RowWise",
    Blocks.ROW_128: "BlockWise1x128",
    Blocks.SQUARE_128: "BlockWise128x128",
    Blocks.ROW_32: "BlockWise1x32",
}
# The first CUDA devices whose scaled_mm takes such blocks, by compute capability.
OLDEST_DEVICE = {
    Blocks.TENSOR: (8, 9),
    Blocks.ROW: (9, 0),
    Blocks.ROW_128: (9, 0),
    Blocks.SQUARE_128: (9, 0),
    Blocks.ROW_32: (10, 0),
}
# What torch has for compute capability 9 alone, and what it multiplies in e4m3 alone.
_HOPPER_ALONE = frozenset({Blocks.ROW_128, Blocks.SQUARE_128})
E4M3_ALONE = _HOPPER_ALONE | {Blocks.ROW_32}


def runs_on(blocks: Blocks, capability: tuple[int, int]) -> bool:
    """Return whether torch multiplies such blocks on a CUDA device of that capability."""
    is_hopper = capability[0] == 9
    return capability >= OLDEST_DEVICE[blocks] and (is_hopper or blocks not in _HOPPER_ALONE)


def scaled_matmul_kind(device_type: str, dtype: torch.dtype) -> str:
    """Return how products of a model in `dtype` are computed: `NATIVE` or `EMULATED`."""
    return NATIVE if device_type == "cuda" and dtype == torch.bfloat16 else EMULATED


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T [m, n] in `dtype`, of a [m, k] and b [n, k].

    Both have one scale for each row, or blocks of equally many columns.

    Raises:
        ValueError: k differs, or the blocks of the two do not fit each other.
    """
    fits = a.codes.shape[1] == b.codes.shape[1] and a.scales.shape[1] == b.scales.shape[1]
    if not fits:
        raise ValueError(
            "two matrices cannot be multiplied along their blocks\n"
            f"  found: {tuple(a.codes.shape)} {a.blocks.name}, "
            f"{tuple(b.codes.shape)} {b.blocks.name}\n"
            "  fix: give [m, k] and [n, k] in blocks of equally many columns"
        )
    if scaled_matmul_kind(a.codes.device.type, dtype) == NATIVE:
        return _native(a, b, dtype)
    return emulated_matmul(a, b, dtype)


def emulated_matmul(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return what `scaled_matmul` does, by ordinary products in fp32, or in float64 for it."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if a.blocks is Blocks.ROW_32:
        return (dequantize(a, wide) @ dequantize(b, wide).t()).to(dtype)
    count = a.scales.shape[1]
    columns = a.codes.shape[1] // count
    sums = None
    for at in range(count):
        block = slice(at * columns, (at + 1) * columns)
        product = a.codes[:, block].to(wide) @ b.codes[:, block].to(wide).t()
        product.mul_(_of_rows(a, at).to(wide)).mul_(_of_rows(b, at).to(wide).t())
        sums = product if sums is None else sums.add_(product)
    assert sums is not None  # noqa: S101  # invariant: there is at least one block
    return sums.to(dtype)


def _of_rows(matrix: Quantized, column: int) -> Tensor:
    """Return the scales of a column of blocks as [m, 1], or [1, 1] where all are one."""
    scales = matrix.scales[:, column : column + 1]
    if scales.shape[0] in (1, matrix.codes.shape[0]):
        return scales
    return scales.repeat_interleave(matrix.codes.shape[0] // scales.shape[0], dim=0)


def _native(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    swizzle = F.SwizzleType.NO_SWIZZLE
    if a.blocks is Blocks.ROW_32:
        swizzle = F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=_arranged(a),
        scale_recipe_a=getattr(F.ScalingType, _RECIPES[a.blocks]),
        scale_b=_arranged(b).t() if b.blocks is Blocks.ROW else _arranged(b),
        scale_recipe_b=getattr(F.ScalingType, _RECIPES[b.blocks]),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )


def _arranged(matrix: Quantized) -> Tensor:
    """Return scales in the order in which cuBLAS reads them (cuBLAS manual, "Scaling factors")."""
    scales = matrix.scales
    match matrix.blocks:
        case Blocks.ROW_128:  # column after column
            return scales.t().contiguous().t()
        case Blocks.SQUARE_128:  # rows of a multiple of 4, column after column
            return F.pad(scales, (0, -scales.shape[1] % 4)).t()
        case Blocks.ROW_32:
            return _tiled(scales)
        case _:
            return scales


def _tiled(scales: Tensor) -> Tensor:
    """Return [m, k] scales in tiles of 128 x 4, in each of which 32 rows stand side by side."""
    rows, columns = scales.shape
    bits = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = bits.view(bits.shape[0] // 128, 4, 32, bits.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
