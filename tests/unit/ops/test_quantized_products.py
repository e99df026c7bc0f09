"""Weights in 8 bits multiply as their values times their scales, in any number of rows alike."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops import library
from megatron.ops.quantized_products import QuantizedProduct, StoredFormat, quantized
from tests.support.examples import examples

FORMATS: tuple[StoredFormat, ...] = ("int8", "fp8")
# Half a step of 1/127 of the largest value; half a step of a mantissa of 3 bits.
NEAREST = {"int8": 0.5 / 127, "fp8": 2**-4}
# A product in the dtype itself: bfloat16 rounds it to 2^-8, and once more with its scale.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@examples(60)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 99),
    st.floats(1e-5, 1e3),
)
def test_values_are_the_nearest_and_none_is_cut(
    stored: StoredFormat, dtype: torch.dtype, seed: int, size: float
) -> None:
    weight = (random(6, 40, seed=seed) * size).to(dtype)
    weight[2] = 0.0
    values, scales = quantized(weight, stored)
    expected = torch.float32 if dtype is torch.float16 else dtype
    assert (values.element_size(), scales.dtype) == (1, expected)
    found = values.float() * scales.float().unsqueeze(1)
    assert torch.equal(found[2], torch.zeros(40))
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    # Scales in bfloat16 are off by 2^-9 at most, and the largest value with them.
    error = (found - weight.float()).abs() / largest.clamp(min=1e-30)
    assert error.max() <= NEAREST[stored] + 2**-8
    assert values.float().isfinite().all()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 41])
def test_products_are_those_of_the_stored_values_for_any_number_of_rows(
    stored: StoredFormat, dtype: torch.dtype, inputs: int
) -> None:
    weight, rows, bias = (
        random(24, inputs).to(dtype),
        random(70, inputs, seed=1).to(dtype),
        random(24, seed=2).to(dtype),
    )
    product = QuantizedProduct(weight, stored)
    whole = product(rows, bias)
    values, scales = quantized(weight, stored)
    assert (product.values.shape, product.values.dtype) == (values.shape, values.dtype)
    dense = values.float() * scales.float().unsqueeze(1)
    expected = F.linear(rows.float(), dense, bias.float())
    wrong = (whole.float() - expected).abs().max()
    assert wrong <= CLOSE[dtype] * expected.abs().max()
    for count in (0, 1, 2, 3, 7, 16, 65):
        assert torch.equal(product(rows[:count], bias), whole[:count])
    assert product(rows.view(7, 10, inputs)).shape == (7, 10, 24)
    has_kernel = stored == "int8" and library.INSTRUCTION_SET is not None
    assert (product.dense_bytes == 0) == has_kernel


def test_each_of_several_weights_has_its_own_product() -> None:
    weights, rows = random(3, 8, 32).bfloat16(), random(5, 32, seed=1).bfloat16()
    product = QuantizedProduct(weights, "int8")
    for group in range(3):
        alone = QuantizedProduct(weights[group], "int8")(rows)
        assert torch.equal(product(rows, group=group), alone)


def test_without_kernels_weights_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = random(24, 40).bfloat16(), random(9, 40, seed=1).bfloat16()
    by_kernel = QuantizedProduct(weight, "int8")(rows)
    monkeypatch.setattr(library, "INSTRUCTION_SET", None)
    product = QuantizedProduct(weight, "int8")
    assert product.dense_bytes == 24 * 40 * 2
    close = CLOSE[torch.bfloat16] * by_kernel.float().abs().max().item()
    torch.testing.assert_close(product(rows), by_kernel, rtol=0, atol=close)
