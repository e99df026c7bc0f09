"""The law of kernels for products with a packed weight, whose rows keep their bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.kernels.products import DTYPES, KERNEL, PACK, check, check_rows, check_some, draw
from tests.support.examples import examples


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    shape=st.tuples(st.integers(0, 30), st.integers(1, 70), st.integers(1, 120)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    in_int8=st.booleans(),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(
    shape, dtype, has_bias, in_int8, seed
):
    *operands, bias = draw(*shape, dtype, seed, in_int8=in_int8)
    check((*operands, bias if has_bias else None))
    check_rows((*operands, bias if has_bias else None))


def test_the_operators_keep_the_promises_of_their_schemas():
    for in_int8 in (False, True):
        # Whole panels and words, as the shapes say.
        x, weight, scales, bias = draw(3, 8, 48, torch.float32, in_int8=in_int8)
        torch.library.opcheck(PACK, (weight,))
        torch.library.opcheck(KERNEL, (x, PACK(weight), scales, bias, 48))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    x, weight, _, bias = draw(3, 4, 6, torch.float32)
    packed = PACK(weight)
    for wrong in (x.double(), x[0], x[:, ::2]):
        with pytest.raises(RuntimeError, match=r"contiguous float32 \[rows, inputs\]"):
            KERNEL(wrong, packed, None, bias, 6)
    _, values, scales, _ = draw(3, 4, 6, torch.float32, in_int8=True)
    for operands in (
        (x[:, :3].contiguous(), packed, None, bias),
        (x, packed, None, bias[:5]),
        (x, packed, None, bias.bfloat16()),
        (x, PACK(values), scales[:5], bias),
    ):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL(*operands, 6)
    for operands in ((x, packed, scales, None), (x, PACK(values), None, None)):
        with pytest.raises(RuntimeError, match="int8"):
            KERNEL(*operands, 6)
    with pytest.raises(RuntimeError, match="scales or bias are not contiguous"):
        KERNEL(x, packed, None, torch.zeros(12)[::2], 6)
    for wrong in (weight[0], weight.t()):
        with pytest.raises(RuntimeError, match=r"contiguous \[outputs, inputs\]"):
            PACK(wrong)
    with pytest.raises(RuntimeError, match="packed weights are float32, bfloat16, or int8"):
        PACK(weight.double())


def test_what_is_not_finite_is_not_hidden():
    for dtype in DTYPES:
        x, weight, _, bias = draw(3, 5, 50, dtype)
        x[1, 2], weight[49, 0] = torch.nan, torch.inf
        found = KERNEL(x, PACK(weight), None, bias, 50)
        assert found[1].isnan().all()
        assert not found[:, 49].isfinite().any()
        assert found[::2, :49].isfinite().all()


def _last_input_forgotten(x, packed, scales, bias, outputs):
    short = x.clone()
    short[:, -1] = 0
    return KERNEL(short, packed, scales, bias, outputs)


def _scales_of_others(x, packed, scales, bias, outputs):
    return KERNEL(x, packed, scales.flip(0), bias, outputs)


@pytest.mark.parametrize("wrong", [_last_input_forgotten, _scales_of_others])
def test_the_law_sees_a_wrong_kernel(wrong):
    operands = draw(4, 33, 96, torch.float32, in_int8=True)
    check(operands)
    with pytest.raises(AssertionError):
        check(operands, kernel=wrong)
