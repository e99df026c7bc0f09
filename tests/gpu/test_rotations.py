"""The law of kernels of rotations on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from tests.laws.kernels.rotations import DTYPES, SHAPES, check, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_compute_what_the_reference_means(dtype):
    here = device.select("cuda", 0)
    for number, shape in enumerate((*SHAPES, ((512, 4, 8, 4, 128), 128, True))):
        heads, cos, sin = draw(*shape, dtype, seed=number)
        # Moved whole: strides stay those of a split.
        moved = heads.new_empty(0, device=here).new_empty_strided(heads.shape, heads.stride())
        check(moved.copy_(heads), cos.to(here), sin.to(here))


def test_operands_that_are_not_aligned_are_read_one_element_at_a_time():
    here = device.select("cuda", 0)
    heads, cos, sin = (one.to(here) for one in draw((5, 2, 1, 3, 64), 64, True, torch.bfloat16))
    shifted = torch.empty(heads.numel() + 1, dtype=heads.dtype, device=here)[1:]
    shifted = shifted.view(heads.shape).copy_(heads)
    assert shifted.data_ptr() % 16 != 0
    check(shifted, cos, sin)
