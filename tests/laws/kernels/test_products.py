"""The law of kernels for products with a packed weight, whose rows keep their bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.packed_product import packed_product_reference
from tests.laws.kernels.products import DTYPES, KERNEL, PACK, check, check_rows, check_some, draw
from tests.support.examples import examples


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    shape=st.tuples(st.integers(0, 30), st.integers(1, 70), st.integers(1, 120)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(shape, dtype, has_bias, seed):
    x, weight, bias = draw(*shape, dtype, seed)
    check(x, weight, bias if has_bias else None)
    check_rows(x, weight, bias if has_bias else None)


def test_the_operators_keep_the_promises_of_their_schemas():
    x, weight, bias = draw(3, 5, 48, torch.float32)  # whole panels, as the shapes say
    torch.library.opcheck(PACK, (weight,))
    torch.library.opcheck(KERNEL, (x, PACK(weight), bias, 48))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    x, weight, bias = draw(3, 4, 6, torch.float32)
    packed = PACK(weight)
    for wrong in (x.double(), x[0], x[:, ::2]):
        with pytest.raises(RuntimeError, match=r"contiguous float32 \[rows, inputs\]"):
            KERNEL(wrong, packed, bias, 6)
    for operands in ((x[:, :3].contiguous(), packed, bias, 6), (x, packed, bias[:5], 6)):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL(*operands)
    with pytest.raises(RuntimeError, match="bias of a product is not contiguous"):
        KERNEL(x, packed, torch.zeros(12)[::2], 6)
    for wrong in (weight[0], weight.t()):
        with pytest.raises(RuntimeError, match=r"contiguous \[outputs, inputs\]"):
            PACK(wrong)
    with pytest.raises(RuntimeError, match="packed weights are float32 or bfloat16"):
        PACK(weight.double())


def test_what_is_not_finite_is_not_hidden():
    for dtype in DTYPES:
        x, weight, bias = draw(3, 5, 50, dtype)
        x[1, 2], weight[49, 0] = torch.nan, torch.inf
        found = KERNEL(x, PACK(weight), bias, 50)
        assert found[1].isnan().all()
        assert not found[:, 49].isfinite().any()
        assert found[::2, :49].isfinite().all()


def _last_input_forgotten(x, packed, bias, outputs):
    short = x.clone()
    short[:, -1] = 0
    return KERNEL(short, packed, bias, outputs)


def _summed_in_bfloat16(x, packed, bias, outputs):
    half = [None if t is None else t.bfloat16() for t in (x, bias)]
    found = packed_product_reference(half[0], packed.bfloat16(), half[1], outputs)
    return found.to(packed.dtype)


@pytest.mark.parametrize("wrong", [_last_input_forgotten, _summed_in_bfloat16])
def test_the_law_sees_a_wrong_kernel(wrong):
    # In whole panels of one vector the packed weight of the reference would be another.
    x, weight, bias = draw(4, 33, 96, torch.float32)
    check(x, weight, bias)
    with pytest.raises(AssertionError):
        check(x, weight, bias, kernel=wrong)
