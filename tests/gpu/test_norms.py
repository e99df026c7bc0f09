"""The law of kernels on CUDA: as in tests/laws/kernels, by the same comparisons."""

import pytest
import torch

from megatron import device
from tests.laws.kernels.norms import DTYPES, NORMS, Operands, check_both

pytestmark = pytest.mark.gpu

SHAPES = (
    (0, 8),
    (3, 0),
    (1, 1),
    (9, 2),
    (2, 3, 7),
    (33, 128),
    (3000, 520),
    (5, 4097),
    (4, 16384),  # sums of gradients do not fit into shared memory
    (1, 1 << 20),
)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_kernels_compute_what_the_reference_means(norm, dtypes):
    here = device.select("cuda", 0)
    for number, shape in enumerate(SHAPES):
        for has_residual in (False, True):
            drawn = Operands.draw(norm, shape, dtypes, has_residual=has_residual, seed=number)
            check_both(norm, drawn.to(here))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_rows_that_are_not_aligned_are_read_one_element_at_a_time(norm):
    here = device.select("cuda", 0)
    drawn = Operands.draw(norm, (5, 64), DTYPES[2], has_residual=False).to(here)
    out = norm.kernel()(drawn.x, None, *drawn.vectors, 1e-5)[0]
    shifted = torch.empty(5 * 64 + 1, dtype=drawn.x.dtype, device=here)[1:].view(5, 64)
    shifted.copy_(drawn.x)
    assert shifted.data_ptr() % 16 != 0
    same = norm.kernel()(shifted, None, *drawn.vectors, 1e-5)[0]
    torch.testing.assert_close(same, out, rtol=2**-7, atol=0)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)
def test_two_runs_give_the_same_bits(norm):
    here = device.select("cuda", 0)
    drawn = Operands.draw(norm, (2000, 1000), DTYPES[2], has_residual=True).to(here)
    runs = []
    for _ in range(2):
        made = norm.kernel()(drawn.x, drawn.residual, *drawn.vectors, 1e-5)
        saved = (drawn.added, drawn.vectors[0], *made[2:])
        runs.append([*made, *norm.kernel("_backward")(drawn.grad, drawn.grad_added, *saved)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
