"""Quantisation of a matrix to an 8-bit format with scales: x is close to codes * scales.

The elements of a block share a scale, its largest absolute value over that of the format (1x32:
the next power of two). What a reader would get wrong: a block with a NaN or an infinity becomes NaN
as a whole, so that the check of a step's numbers finds it; it is never clamped away. Sources: arXiv
2209.05433 (formats), OCP Microscaling Formats 1.0 (1x32), arXiv 2412.19437 section 3.3 (128).
"""

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST = 2.0**-126  # of a scale in fp32: below it, numbers lose their precision


class Blocks(Enum):
    """Which elements of a matrix share a scale: (rows, columns) of a block, 0 for all."""

    TENSOR = (0, 0)
    ROW = (1, 0)
    ROW_128 = (1, 128)
    SQUARE_128 = (128, 128)
    ROW_32 = (1, 32)  # scales are powers of two

    def size(self, shape: torch.Size) -> tuple[int, int]:
        """Return rows and columns of one block of a matrix.

        Raises:
            ValueError: the matrix is not a number of whole blocks.
        """
        rows, columns = (block or length for block, length in zip(self.value, (*shape, 0, 0)))
        if len(shape) != 2 or 0 in shape or shape[0] % rows or shape[1] % columns:
            raise ValueError(
                "a matrix is not a number of whole blocks that share a scale\n"
                f"  found: {tuple(shape)} in blocks of {rows} x {columns}\n"
                "  fix: give dimensions that are multiples of a block's"
            )
        return rows, columns


class Quantized(NamedTuple):
    """A matrix [m, k] as 8-bit codes of its shape and one scale for each block.

    Scales are [m / rows, k / columns], fp32, or e8m0 for blocks of 1x32.
    """

    codes: Tensor
    scales: Tensor
    blocks: Blocks


def block_amax(x: Tensor, blocks: Blocks) -> Tensor:
    """Return the largest absolute value of every block of `x` [m, k] in fp32.

    It is infinite for a block with a NaN or an infinity: a maximum over ranks keeps infinities,
    but not every library keeps NaNs.
    """
    largest = _as_blocks(x, blocks).abs().amax(dim=(1, 3)).float()
    return largest.nan_to_num(nan=torch.inf, posinf=torch.inf)


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
) -> Quantized:
    """Return `x` [m, k] in 8 bits of `dtype`, float8_e4m3fn or float8_e5m2.

    Codes are rounded to the nearest, ties to even, and beyond the largest one to it. A block of
    zeros has the scale 1.

    Args:
        amax: of every block, as by `block_amax`, where other ranks hold parts of the blocks.
        margin: scales are 2^margin times what the largest value needs.

    Raises:
        ValueError: the matrix is not a number of whole blocks.
    """
    largest = torch.finfo(dtype).max
    amax = block_amax(x, blocks) if amax is None else amax
    needed = amax * (2.0**margin / largest)
    if blocks is Blocks.ROW_32:
        scales = _powers_of_two(needed)
    else:
        scales = torch.where(needed > 0, needed.clamp_min(_SMALLEST), 1.0)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = _as_blocks(x, blocks).to(wide) / scales.to(wide)[:, None, :, None]
    codes = parts.clamp(-largest, largest).float().to(dtype)  # clamping keeps NaNs
    # Of a transposed view the parts are in its order of memory.
    return Quantized(codes.reshape(x.shape).contiguous(), scales, blocks)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return codes times scales; exact in float64, and in fp32 for blocks of 1x32."""
    parts = _as_blocks(quantized.codes.to(dtype), quantized.blocks)
    scales = quantized.scales.to(dtype)[:, None, :, None]
    return (parts * scales).reshape(quantized.codes.shape)


def _as_blocks(x: Tensor, blocks: Blocks) -> Tensor:
    """Return `x` [m, k] as [m / rows, rows, k / columns, columns]."""
    rows, columns = blocks.size(x.shape)
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _powers_of_two(needed: Tensor) -> Tensor:
    """Return the smallest powers of two that are not below `needed`, as e8m0.

    Zeros give 1, infinities NaN.
    """
    fraction, exponent = torch.frexp(needed)  # fraction in [0.5, 1)
    exponent = (exponent - (fraction == 0.5).int()).clamp(-127, 127)
    exponent = exponent.masked_fill(needed == 0, 0)
    bits = (exponent + 127).masked_fill(~needed.isfinite(), 255)
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)
