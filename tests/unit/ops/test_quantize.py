"""The 8-bit formats bit by bit, against a slow reference that decodes and compares fractions."""

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops.quantize import Blocks, block_amax, dequantize, quantize
from tests.support.examples import examples

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
# Bits of exponent and fraction, bias, and the largest finite code.
LAYOUTS = {torch.float8_e4m3fn: (4, 3, 7, 0x7E), torch.float8_e5m2: (5, 2, 15, 0x7B)}


def decoded(code: int, dtype: torch.dtype) -> Fraction:
    """The value of a finite code without a sign, from its bits."""
    _, fraction_bits, bias, _ = LAYOUTS[dtype]
    exponent, fraction = divmod(code, 2**fraction_bits)
    if exponent == 0:  # subnormal
        return Fraction(fraction, 2**fraction_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(fraction, 2**fraction_bits)) * Fraction(2) ** (exponent - bias)


POSITIVE = {
    dtype: [decoded(code, dtype) for code in range(LAYOUTS[dtype][3] + 1)] for dtype in FORMATS
}


def nearest_code(value: float, dtype: torch.dtype) -> int:
    """The code of a finite number: the nearest, of two the even one, and never an infinity."""
    size = abs(Fraction(value))
    table = POSITIVE[dtype]
    at = min(bisect_left(table, size), len(table) - 1)
    code = min(range(max(0, at - 1), at + 1), key=lambda at: (abs(table[at] - size), at % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def codes_of(values: Tensor, dtype: torch.dtype) -> list[int]:
    """The codes of a row of numbers under the scale 1."""
    row = values.reshape(1, -1)
    amax = torch.full((1, 1), torch.finfo(dtype).max)
    result = quantize(row, dtype, Blocks.ROW, amax=amax)
    assert float(result.scales) == 1.0
    bits: list[int] = result.codes.view(torch.uint8)[0].tolist()
    return bits


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_torch_decodes_every_code_as_its_bits_say(dtype: torch.dtype) -> None:
    finite = LAYOUTS[dtype][3]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    for code in range(256):
        value = float(values[code])
        if code % 128 <= finite:
            expected = float(decoded(code % 128, dtype)) * (-1 if code > 127 else 1)
            assert math.copysign(1, value) * abs(value) == expected
        else:
            assert not math.isfinite(value)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("given_as", [torch.float32, torch.float64, torch.bfloat16])
def test_every_code_every_tie_and_what_is_beside_it_is_rounded_right(
    dtype: torch.dtype, given_as: torch.dtype
) -> None:
    table = [float(value) for value in POSITIVE[dtype]]
    ties = [(one + other) / 2 for one, other in pairwise(table)]
    beyond = [table[-1] * 1.01, table[-1] * 2, 1e30]
    exact = torch.tensor([*table, *ties, *beyond], dtype=torch.float64)
    beside = torch.cat([exact, exact * (1 + 2**-20), exact * (1 - 2**-20)])
    values = torch.cat([beside, -beside]).to(given_as)
    assert codes_of(values, dtype) == [nearest_code(float(v), dtype) for v in values.double()]


@examples(300)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_any_number_has_the_nearest_code(dtype: torch.dtype, values: list[float]) -> None:
    row = torch.tensor(values, dtype=torch.float32)
    assert codes_of(row, dtype) == [nearest_code(float(value), dtype) for value in row]


def matrix(rows: int = 256, columns: int = 384) -> Tensor:
    """Values of many sizes."""
    draw = torch.Generator().manual_seed(5)
    values = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    return values * torch.exp(3 * torch.randn(rows, 1, generator=draw, dtype=torch.float64))


@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_block_has_the_scale_of_its_largest_value(blocks: Blocks, dtype: torch.dtype) -> None:
    x = matrix()
    result = quantize(x, dtype, blocks)
    rows, columns = blocks.size(x.shape)
    largest = torch.finfo(dtype).max
    for i in range(x.shape[0] // rows):
        for j in range(0, x.shape[1] // columns):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            needed = float(block.abs().max()) / largest
            scale = float(result.scales[i, j].float())
            if blocks is Blocks.ROW_32:
                assert scale == 2.0 ** math.ceil(math.log2(needed))
            else:
                assert scale == pytest.approx(needed, rel=1e-6)
    error = (dequantize(result, torch.float64) - x).abs()
    step = 2.0 ** -(LAYOUTS[dtype][1] + 1)  # half a step of the fraction
    smallest = float(POSITIVE[dtype][1]) / 2
    scales = dequantize(result._replace(codes=torch.ones_like(result.codes)), torch.float64)
    assert (error <= x.abs() * step * 1.001 + scales * smallest).all()


@examples(200)
@given(size=st.floats(2.0**-140, 2.0**127, width=32))
def test_powers_of_two_are_the_smallest_that_hold_the_largest_value(size: float) -> None:
    x = torch.full((1, 32), size)
    scale = float(quantize(x, torch.float8_e4m3fn, Blocks.ROW_32).scales.float())
    assert math.frexp(scale)[0] == 0.5  # a power of two
    assert size <= scale * 448 * (1 + 2**-22)
    assert scale == 2.0**-127 or size > scale / 2 * 448 * (1 - 2**-22)


@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_and_no_other(blocks: Blocks, poison: float) -> None:
    x = matrix()
    x[130, 200] = poison
    for dtype in FORMATS:
        back = dequantize(quantize(x, dtype, blocks), torch.float32)
        rows, columns = blocks.size(x.shape)
        i, j = 130 // rows * rows, 200 // columns * columns
        spoiled = torch.zeros_like(x, dtype=torch.bool)
        spoiled[i : i + rows, j : j + columns] = True
        assert back[spoiled].isnan().all()
        assert back[~spoiled].isfinite().all()


@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("value", [0.0, 2.0**-149, 2.0**-126])
def test_zeros_and_the_smallest_numbers_stay_finite(blocks: Blocks, value: float) -> None:
    x = torch.full((128, 128), value)
    result = quantize(x, torch.float8_e4m3fn, blocks)
    back = dequantize(result, torch.float32)
    assert (back - x).abs().max() <= 2.0**-126 * 2.0**-6
    assert result.scales.float().isfinite().all()
    if value == 0.0:
        assert (result.scales.float() == 1.0).all()


def test_a_margin_leaves_room_above_the_largest_value() -> None:
    x = matrix()
    plain, roomy = (quantize(x, torch.float8_e4m3fn, Blocks.ROW, margin=m) for m in (0, 2))
    assert torch.equal(roomy.scales, 4 * plain.scales)
    assert roomy.codes.float().abs().max() <= 112
    assert plain.codes.float().abs().max() == 448


@pytest.mark.parametrize("blocks", [Blocks.TENSOR, Blocks.SQUARE_128])
def test_a_transposed_view_is_quantised_as_its_copy(blocks: Blocks) -> None:
    x = matrix(256, 128)
    view, copy = (quantize(one, torch.float8_e5m2, blocks) for one in (x.t(), x.t().contiguous()))
    assert view.codes.is_contiguous()
    assert torch.equal(view.codes.float(), copy.codes.float())
    assert torch.equal(view.scales, copy.scales)


def test_the_largest_values_of_parts_make_those_of_the_whole() -> None:
    x = matrix()
    left, right = x.split(192, dim=1)
    both = torch.maximum(block_amax(left, Blocks.ROW), block_amax(right, Blocks.ROW))
    parts = [quantize(part, torch.float8_e4m3fn, Blocks.ROW, amax=both) for part in (left, right)]
    whole = quantize(x, torch.float8_e4m3fn, Blocks.ROW)
    assert torch.equal(torch.cat([part.codes.float() for part in parts], 1), whole.codes.float())


@pytest.mark.parametrize("shape", [(128, 100), (100, 128), (0, 128), (128,)])
def test_matrices_of_broken_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a number of whole blocks"):
        quantize(torch.ones(shape), torch.float8_e4m3fn, Blocks.SQUARE_128)
