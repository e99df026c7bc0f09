"""The law of kernels of the cross entropy on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from tests.laws.kernels.losses import DTYPES, KERNEL, SHAPES, Rows, check_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_compute_what_the_reference_means(dtype):
    here = device.select("cuda", 0)
    for number, shape in enumerate((*SHAPES, (600, 50304, 50257), (1, 1 << 20, 1 << 20))):
        check_rows(Rows.draw(shape, dtype, seed=number).to(here))


def test_two_runs_give_the_same_bits_and_unaligned_rows_the_same_sums():
    rows = Rows.draw((70, 1000, 999), torch.bfloat16).to(device.select("cuda", 0))
    first, second = (KERNEL.cross_entropy_statistics(*_of(rows)) for _ in range(2))
    assert torch.equal(first, second)
    shifted = torch.empty(70 * 1000 + 1, dtype=rows.logits.dtype, device=rows.logits.device)
    shifted = shifted[1:].view(70, 1000).copy_(rows.logits)
    check_rows(Rows(shifted, rows.labels, rows.factors, rows.true_width))


def _of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, int]:
    return rows.logits, rows.labels, rows.true_width
