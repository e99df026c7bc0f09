"""The law of kernels of AdamW on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from tests.laws.kernels.updates import DTYPES, SIZES, check, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_kernels_compute_what_the_reference_means(dtypes):
    here = device.select("cuda", 0)
    for sizes in (SIZES, [100] * 120, [2**22 + 5]):
        check(draw(dtypes, sizes).moved(lambda tensor: tensor.to(here)))


def test_tensors_that_are_not_aligned_are_updated_one_element_at_a_time():
    here = device.select("cuda", 0)
    operands = draw(DTYPES[0], [4096])
    of_weight = torch.empty(4097, device=here)[1:].copy_(operands.weights[0])
    moved = operands.moved(lambda tensor: tensor.to(here))
    check(moved._replace(weights=[of_weight]))
