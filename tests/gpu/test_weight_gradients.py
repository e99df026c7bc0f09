"""On a GPU, products of half precision add to gradients in float32 before they are rounded."""

import pytest
import torch

from megatron.mpu.weight_gradients import add_product

pytestmark = pytest.mark.gpu

ROWS, OUT, IN = 512, 96, 160


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_add_to_a_sum_in_float32(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(1)
    pairs = [
        (
            torch.randn(ROWS, OUT, generator=drawn).to("cuda", dtype),
            torch.randn(ROWS, IN, generator=drawn).to("cuda", dtype),
        )
        for _ in range(3)
    ]
    total = torch.full((OUT, IN), torch.nan, device="cuda")
    for at, (rows_out, rows_in) in enumerate(pairs):
        add_product(total, rows_out, rows_in, is_first=at == 0)
    exact = sum(rows_out.double().t() @ rows_in.double() for rows_out, rows_in in pairs)
    # Rounded to bfloat16 before they are added, they would be off by up to 0.4.
    torch.testing.assert_close(total.double(), exact, rtol=0.0, atol=5e-3)
