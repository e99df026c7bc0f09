"""The law of kernels of activations on CUDA: by the comparisons of tests/laws/kernels."""

import pytest
import torch

from megatron import device
from megatron.ops.activation import ActivationKind
from tests.laws.kernels.activations import DTYPES, SHAPES, check_kind, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ActivationKind, ids=lambda kind: kind.name.lower())
def test_kernels_compute_what_the_reference_means(kind, dtype):
    here = device.select("cuda", 0)
    for number, shape in enumerate((*SHAPES, (4096, 2048))):
        for gated in (False, True):
            grad, x = (one.to(here) for one in draw(shape, dtype, gated=gated, seed=number))
            check_kind(kind, grad, x, gated=gated)


def test_operands_that_are_not_aligned_are_read_one_element_at_a_time():
    here = device.select("cuda", 0)
    grad, x = (one.to(here) for one in draw((5, 64), torch.bfloat16, gated=True))
    shifted = torch.empty(5 * 64 + 1, dtype=x.dtype, device=here)[1:].view(5, 64).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    check_kind(ActivationKind.SILU, grad, shifted, gated=True)
