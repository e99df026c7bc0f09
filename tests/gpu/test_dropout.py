"""The law of kernels of dropout on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from megatron.ops.dropout import draw_seed, is_kept
from tests.laws.kernels.dropouts import DTYPES, KERNEL, SHAPES, check, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernels_compute_what_the_reference_means(dtypes):
    here = device.select("cuda", 0)
    for number, shape in enumerate((*SHAPES, (2048, 4096))):
        check(*(one.to(here) for one in draw(shape, dtypes, seed=number)))


def test_the_mask_is_that_of_the_cpu():
    here, seed = device.select("cuda", 0), torch.tensor(2**40 + 5)
    dropped = KERNEL(torch.ones(100_001, device=here), None, 0.3, seed.to(here))
    assert torch.equal(dropped.cpu() != 0, is_kept(100_001, 0.3, seed))


def test_operands_that_are_not_aligned_are_read_one_element_at_a_time():
    here = device.select("cuda", 0)
    x, residual, seed = (one.to(here) for one in draw((2, 4096), DTYPES[2]))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=here)[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    check(shifted, residual, seed)


def test_seeds_are_drawn_on_the_device():
    here = device.select("cuda", 0)
    assert draw_seed(here).device == here
