"""The law of kernels for dropout: they drop what the reference drops, and compute what it means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.dropout import dropout_add, dropout_add_reference
from tests.laws.kernels.dropouts import DTYPES, KERNEL, check, check_some, draw
from tests.support.examples import examples

FP32 = DTYPES[0]


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    shape=st.lists(st.integers(0, 20), max_size=4).map(tuple),
    dtypes=st.sampled_from(DTYPES),
    probability=st.floats(0, 1, exclude_max=True).filter(lambda p: p < 1 - 2**-20),
    seed=st.integers(0, 999),
)
@examples(80)
def test_kernels_compute_what_the_reference_means_for_any_shape(shape, dtypes, probability, seed):
    check(*draw(shape, dtypes, seed), probability=probability)


def test_the_mask_is_the_same_in_every_dtype_and_shape():
    names = torch.tensor(2**40 + 5), torch.arange(90) + 2**36
    expected = dropout_add_reference(torch.ones(90, 100), None, 0.5, *names) != 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((90, 100), (9000,), (3, 30, 100)):
            dropped = KERNEL(torch.ones(shape, dtype=dtype), None, 0.5, *names)
            assert torch.equal((dropped != 0).view(90, 100), expected)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        many = KERNEL(torch.ones(9000, 100), None, 0.5, names[0], torch.arange(9000) + 2**36)
        torch.set_num_threads(before)
        assert torch.equal(many[:90] != 0, expected)


def test_strides_make_no_difference():
    x, residual, seed, numbers = draw((30, 170), FP32)
    expected = KERNEL(x, residual, 0.5, seed, numbers)
    apart = [one.t().contiguous().t() for one in (x, residual)]
    assert not apart[0].is_contiguous()
    assert torch.equal(KERNEL(*apart, 0.5, seed, numbers), expected)


def test_gradients_are_those_of_finite_differences():
    x, residual, *names = draw((3, 5), DTYPES[1])
    leaves = (x.requires_grad_(), residual.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, r: dropout_add(x, r, 0.4, *names), leaves)
    assert torch.autograd.gradgradcheck(lambda x, r: dropout_add(x, r, 0.4, *names), leaves)
    assert torch.autograd.gradcheck(lambda x: dropout_add(x, None, 0.4, *names), leaves[:1])


def test_the_operator_keeps_the_promises_of_its_schema():
    for dtypes in (FP32, DTYPES[3]):
        x, residual, *names = draw((3, 5), dtypes)
        torch.library.opcheck(KERNEL, (x, residual, 0.4, *names))
        leaves = (x.requires_grad_(), residual.requires_grad_())
        torch.library.opcheck(KERNEL, (*leaves, 0.4, *names))
        torch.library.opcheck(KERNEL, (x, None, 0.4, *names))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    x, residual, seed, numbers = draw((3, 5), FP32)
    for wrong in (
        (x, residual[:2], 0.5, seed, numbers),
        (x, residual, 0.5, seed.float(), numbers),
        (x, residual, 0.5, seed, numbers.int()),
    ):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL(*wrong)
    for few in (numbers[:2], numbers[:0]):
        with pytest.raises(RuntimeError, match="do not divide into as many rows"):
            KERNEL(x, residual, 0.5, seed, few)
    for wrong in (residual.double(), residual.half()):
        with pytest.raises(RuntimeError, match="a residual has the dtype of x"):
            KERNEL(x, wrong, 0.5, seed, numbers)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(RuntimeError, match=r"a probability is outside \[0, 1\)"):
            KERNEL(x, residual, wrong, seed, numbers)


def _other_seed(x, residual, probability, seed, numbers):
    return dropout_add_reference(x, residual, probability, seed + 1, numbers)


def _low_word_alone(x, residual, probability, seed, numbers):
    return dropout_add_reference(x, residual, probability, seed & 0xFFFFFFFF, numbers)


def _low_word_of_numbers(x, residual, probability, seed, numbers):
    return dropout_add_reference(x, residual, probability, seed, numbers & 0xFFFFFFFF)


def _kept_and_dropped(x, residual, probability, seed, numbers):
    return dropout_add_reference(x, residual, 1 - probability, seed, numbers)


def _one_row_again(x, residual, probability, seed, numbers):
    return dropout_add_reference(x, residual, probability, seed, numbers[:1].expand_as(numbers))


def _rounded_between(x, residual, probability, seed, numbers):
    dropped = dropout_add_reference(x, None, probability, seed, numbers)
    return dropped if residual is None else dropped + residual


@pytest.mark.parametrize(
    "wrong",
    [
        *(_other_seed, _low_word_alone, _low_word_of_numbers, _kept_and_dropped),
        *(_one_row_again, _rounded_between),
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_the_law_sees_a_wrong_kernel(wrong):
    operands = draw((2, 4096), DTYPES[2])
    check(*operands, dropout=dropout_add_reference)
    with pytest.raises(AssertionError):
        check(*operands, dropout=wrong)
