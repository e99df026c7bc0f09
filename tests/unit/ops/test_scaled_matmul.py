"""Products of quantised matrices: equal to those of what the codes and scales stand for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import scaled_matmul as module
from megatron.ops.quantize import Blocks, Quantized, dequantize, quantize
from megatron.ops.scaled_matmul import EMULATED, NATIVE, scaled_matmul, scaled_matmul_kind

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = [
    (Blocks.TENSOR, Blocks.TENSOR),
    (Blocks.ROW, Blocks.ROW),
    (Blocks.ROW_128, Blocks.SQUARE_128),
    (Blocks.ROW_128, Blocks.ROW_128),
    (Blocks.ROW_32, Blocks.ROW_32),
]


def operands(
    blocks: tuple[Blocks, Blocks], a_dtype: torch.dtype = E4M3
) -> tuple[Quantized, Quantized]:
    """[48, 256] and [128, 256], of rows of many sizes."""
    draw = torch.Generator().manual_seed(6)
    a, b = (
        torch.randn(n, 256, generator=draw) * torch.exp(2 * torch.randn(n, 1, generator=draw))
        for n in (48, 128)
    )
    return quantize(a, a_dtype, blocks[0]), quantize(b, E4M3, blocks[1])


@pytest.mark.parametrize("blocks", PAIRS, ids=str)
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)],
)
def test_it_is_the_product_of_what_the_codes_stand_for(
    blocks: tuple[Blocks, Blocks], a_dtype: torch.dtype, dtype: torch.dtype, tolerance: float
) -> None:
    a, b = operands(blocks, a_dtype)
    wide_a, wide_b = (dequantize(one, torch.float64) for one in (a, b))
    product, exact = scaled_matmul(a, b, dtype), wide_a @ wide_b.t()
    assert product.dtype == dtype
    # A sum of terms of both signs is as exact as the sum of their sizes.
    sizes = wide_a.abs() @ wide_b.abs().t()
    assert ((product.double() - exact).abs() <= tolerance * sizes).all()


def test_it_is_what_torch_computes_of_one_scale_each() -> None:
    a, b = operands((Blocks.TENSOR, Blocks.TENSOR))
    scales = (a.scales.view(()), b.scales.view(()))
    theirs = torch._scaled_mm(a.codes, b.codes.t(), *scales, out_dtype=torch.bfloat16)
    ours = scaled_matmul(a, b, torch.bfloat16)
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("blocks", PAIRS, ids=str)
def test_what_is_not_finite_reaches_the_product(blocks: tuple[Blocks, Blocks]) -> None:
    a, b = operands(blocks)
    for poison in (torch.inf, torch.nan):
        x = dequantize(a, torch.float32)
        x[5, 7] = poison
        product = scaled_matmul(quantize(x, E4M3, blocks[0]), b, torch.bfloat16)
        assert product[5].isnan().all()
        if blocks[0] is not Blocks.TENSOR:
            assert product[6].isfinite().all()


def test_matrices_that_do_not_fit_are_refused() -> None:
    a, _ = operands((Blocks.ROW, Blocks.ROW))
    shorter = quantize(torch.ones(16, 128), E4M3, Blocks.ROW)
    for one, other in ((a, shorter), (a, operands(PAIRS[3])[1])):
        with pytest.raises(ValueError, match="cannot be multiplied along their blocks"):
            scaled_matmul(one, other, torch.float32)


def test_products_are_emulated_but_of_bfloat16_on_cuda() -> None:
    assert scaled_matmul_kind("cuda", torch.bfloat16) == NATIVE
    for device, dtype in (
        ("cpu", torch.bfloat16),
        ("meta", torch.bfloat16),
        ("cuda", torch.double),
    ):
        assert scaled_matmul_kind(device, dtype) == EMULATED


@pytest.mark.parametrize("blocks", PAIRS, ids=str)
def test_on_cuda_torch_gets_operands_scales_and_their_layout(
    blocks: tuple[Blocks, Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def recorded(a: Tensor, b: Tensor, **named: Any) -> str:
        given.update(named, a=a, b=b)
        return "the product"

    monkeypatch.setattr(module, "scaled_matmul_kind", lambda *of: NATIVE)
    monkeypatch.setattr(F, "scaled_mm", recorded)
    a, b = operands(blocks)
    assert scaled_matmul(a, b, torch.bfloat16) == "the product"
    assert given["a"].is_contiguous()
    assert given["b"].t().is_contiguous()  # column-major, as cuBLAS wants it
    assert given["output_dtype"] == torch.bfloat16
    for recipe, kind in (("scale_recipe_a", blocks[0]), ("scale_recipe_b", blocks[1])):
        assert given[recipe].name == module._RECIPES[kind]
    swizzled = given["swizzle_a"].name == given["swizzle_b"].name == "SWIZZLE_32_4_4"
    assert swizzled == (blocks[0] is Blocks.ROW_32)
    shapes = {
        Blocks.TENSOR: ((1, 1), (1, 1)),
        Blocks.ROW: ((48, 1), (1, 128)),
        Blocks.ROW_128: ((48, 2), (128, 2)),
        Blocks.SQUARE_128: ((), (4, 1)),  # 2 columns of blocks, in fours
        Blocks.ROW_32: ((128 * 8,), (128 * 8,)),  # 48 rows in a tile of 128
    }
    assert given["scale_a"].shape == shapes[blocks[0]][0]
    assert given["scale_b"].shape == shapes[blocks[1]][1]
    if blocks[0] is Blocks.ROW_128:
        assert given["scale_a"].stride() == (1, 48)
    if blocks[1] is Blocks.SQUARE_128:
        assert given["scale_b"].stride() == (1, 4)


def test_scales_of_32_are_tiled_as_the_manual_of_cublas_says() -> None:
    scales = torch.arange(130 * 6, dtype=torch.int32).remainder(255).to(torch.uint8).view(130, 6)
    tiled = module._tiled(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert tiled.numel() == 256 * 8
    for row in range(130):
        for column in range(6):
            tile = row // 128 * 2 + column // 4
            inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert tiled[tile * 512 + inside] == scales[row, column]
