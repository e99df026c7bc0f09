"""Products with a packed weight are those with the weight; the law of kernels has the details."""

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.packed_product import (
    pack_weight,
    pack_weight_reference,
    packed_product,
    packed_product_reference,
)

# Sums of 24 products of numbers near 1, rounded once to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_product_is_that_with_the_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 3, 24), (50, 24), (50,))
    )
    found = packed_product(pack_weight(weight), 50, x, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert found.dtype == dtype
    assert found.shape == (2, 3, 50)
    torch.testing.assert_close(
        found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    packed = pack_weight_reference(weight)
    reference = packed_product_reference(x.view(6, 24).float(), packed, None, bias, 50)
    torch.testing.assert_close(
        reference.double(), expected.view(6, 50), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_shapes_are_known_without_values() -> None:
    with torch.device("meta"):
        packed = pack_weight(torch.empty(6, 4, dtype=torch.bfloat16))
        found = packed_product(packed, 6, torch.empty(5, 4, dtype=torch.bfloat16), None)
    assert (found.shape, found.dtype) == ((5, 6), torch.bfloat16)
