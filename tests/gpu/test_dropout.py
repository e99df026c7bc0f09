"""The law of kernels of dropout on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from megatron.ops.dropout import is_kept
from tests.laws.kernels.dropouts import DTYPES, KERNEL, SHAPES, check, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernels_compute_what_the_reference_means(dtypes):
    here = device.select("cuda", 0)
    for number, shape in enumerate((*SHAPES, (2048, 4096))):
        check(*(one.to(here) for one in draw(shape, dtypes, seed=number)))


def test_the_mask_is_that_of_the_cpu():
    here, names = device.select("cuda", 0), (torch.tensor(2**40 + 5), torch.arange(101) + 2**36)
    dropped = KERNEL(torch.ones(101, 993, device=here), None, 0.3, *(n.to(here) for n in names))
    assert torch.equal(dropped.cpu() != 0, is_kept(993, 0.3, *names))


def test_operands_that_are_not_aligned_are_read_one_element_at_a_time():
    here = device.select("cuda", 0)
    x, residual, *names = (one.to(here) for one in draw((2, 4096), DTYPES[2]))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=here)[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    check(shifted, residual, *names)
