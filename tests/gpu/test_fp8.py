"""Products in FP8 on CUDA: the same codes as on a CPU, sums within the rounding of fp32."""

import pytest
import torch

from megatron import device
from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.engine.fp8 import probe
from megatron.mpu.layers import FP8_BLOCKS
from megatron.ops.quantize import Blocks, quantize
from megatron.ops.scaled_matmul import (
    E4M3_ALONE,
    NATIVE,
    emulated_matmul,
    runs_on,
    scaled_matmul,
    scaled_matmul_kind,
)

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def matrices():
    draw = torch.Generator().manual_seed(7)
    return [
        (torch.randn(n, 512, generator=draw) * torch.randn(n, 1, generator=draw).exp()).bfloat16()
        for n in (256, 384)
    ]


def skip_where_the_device_cannot(*blocks):
    if not all(runs_on(each, device.capability()) for each in blocks):
        pytest.skip("needs another CUDA device")


@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_codes_and_scales_are_those_of_the_cpu(blocks, dtype):
    here = device.select("cuda", 0)
    for x in matrices():
        x[3, 5], x[200, 17] = torch.nan, 0.0
        there, on_device = (quantize(one, dtype, blocks) for one in (x, x.to(here)))
        assert torch.equal(on_device.codes.view(torch.uint8).cpu(), there.codes.view(torch.uint8))
        assert torch.equal(on_device.scales.float().cpu(), there.scales.float())


FORMATS = [
    (recipe, form)
    for recipe in Fp8Recipe
    for form in Fp8Format
    if form is Fp8Format.E4M3 or not E4M3_ALONE.intersection(FP8_BLOCKS[recipe])
]


@pytest.mark.parametrize(("recipe", "form"), FORMATS)
@pytest.mark.parametrize("of_weights", [False, True])
def test_products_are_those_of_the_emulation(recipe, form, of_weights):
    here = device.select("cuda", 0)
    rows, weight = FP8_BLOCKS[recipe]
    skip_where_the_device_cannot(rows, weight)
    one, other = (x.to(here) for x in matrices())
    a = quantize(one, E4M3 if form is Fp8Format.E4M3 else E5M2, rows)
    b = quantize(other, E4M3, rows if of_weights else weight)
    assert scaled_matmul_kind("cuda", torch.bfloat16) == NATIVE
    product = scaled_matmul(a, b, torch.bfloat16).double()
    exact = emulated_matmul(a, b, torch.float64)
    # Sums on the device are of fewer bits than fp32's; the result is rounded to bfloat16.
    sizes = one.double().abs() @ other.double().abs().t()
    assert ((product - exact).abs() <= exact.abs() * 2**-8 + sizes * 2**-12).all()


@pytest.mark.parametrize(("recipe", "form"), FORMATS)
def test_the_probe_passes(recipe, form):
    device.select("cuda", 0)
    skip_where_the_device_cannot(*FP8_BLOCKS[recipe])
    error, expected = probe(Fp8Config(fp8_format=form, fp8_recipe=recipe), torch.bfloat16)
    assert error == pytest.approx(expected, rel=0.2)


def test_what_is_not_finite_reaches_the_product():
    here = device.select("cuda", 0)
    skip_where_the_device_cannot(Blocks.TENSOR)
    one, other = (x.to(here) for x in matrices())
    one[3, 5] = torch.inf
    a, b = (quantize(x, E4M3, Blocks.TENSOR) for x in (one, other))
    assert scaled_matmul(a, b, torch.bfloat16).isnan().all()
