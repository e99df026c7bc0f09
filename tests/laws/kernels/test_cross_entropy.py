"""The law of kernels for the cross entropy: each computes what its reference means in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.cross_entropy import (
    cross_entropy_gradient_reference,
    cross_entropy_statistics_reference,
)
from tests.laws.kernels.losses import DTYPES, KERNEL, SHAPES, Z_LOSS, Rows, check_rows
from tests.support.examples import examples

of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@of_dtypes
def test_kernels_compute_what_the_reference_means(dtype):
    for number, shape in enumerate(SHAPES):
        check_rows(Rows.draw(shape, dtype, seed=number))


@given(
    rows=st.integers(0, 9),
    columns=st.integers(1, 300),
    padding=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(
    rows, columns, padding, dtype, seed
):
    check_rows(Rows.draw((rows, columns, max(0, columns - padding)), dtype, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_million_is_as_exact(dtype):
    check_rows(Rows.draw((1, 1 << 20, (1 << 20) - 3), dtype))


@of_dtypes
def test_blocks_of_rows_do_not_change_a_bit_of_the_reference(dtype, monkeypatch):
    rows = Rows.draw((9, 33, 29), dtype)
    whole = cross_entropy_statistics_reference(rows.logits, rows.labels, 29)
    gradient = rows.logits.clone()
    cross_entropy_gradient_reference(gradient, rows.labels, *rows.gradient_operands(), 29)
    monkeypatch.setattr("megatron.ops.cross_entropy._BLOCK_ELEMENTS", {"cpu": 70})
    blocks = cross_entropy_statistics_reference(rows.logits, rows.labels, 29)
    assert torch.equal(whole, blocks)
    cross_entropy_gradient_reference(rows.logits, rows.labels, *rows.gradient_operands(), 29)
    assert torch.equal(gradient, rows.logits)


def test_results_do_not_depend_on_the_number_of_threads_or_the_rows_beside():
    rows = Rows.draw((200, 3000, 2900), torch.bfloat16)
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(KERNEL.cross_entropy_statistics(rows.logits, rows.labels, 2900))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)
    alone = KERNEL.cross_entropy_statistics(rows.logits[77:78], rows.labels[77:78], 2900)
    assert torch.equal(made[0][:, 77:78], alone)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_shows_in_its_row_alone(bad):
    rows = Rows.draw((3, 20, 18), torch.float32)
    rows.logits[1, 4] = bad
    total = KERNEL.cross_entropy_statistics(rows.logits, rows.labels, 18)[1]
    assert total.isfinite().tolist() == [True, bad == -torch.inf, True]
    rows.logits[1] = bad  # in every column: there is no largest number to subtract
    total = KERNEL.cross_entropy_statistics(rows.logits, rows.labels, 18)[1]
    assert total[1] == 0 if bad == -torch.inf else total[1].isnan()


def test_operators_keep_the_promises_of_their_schemas():
    rows = Rows.draw((4, 9, 7), torch.float32)
    torch.library.opcheck(KERNEL.cross_entropy_statistics, (rows.logits, rows.labels, 7))
    for z_loss_coeff in (0.0, Z_LOSS):
        operands = (rows.logits.clone(), rows.labels, *rows.gradient_operands(z_loss_coeff), 7)
        torch.library.opcheck(KERNEL.cross_entropy_gradient_.default, operands)


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    rows = Rows.draw((4, 9, 7), torch.float32)
    statistics, gradient = KERNEL.cross_entropy_statistics, KERNEL.cross_entropy_gradient_
    with pytest.raises(RuntimeError, match="not contiguous rows"):
        statistics(rows.logits.t(), rows.labels, 4)
    with pytest.raises(RuntimeError, match="columns that count"):
        statistics(rows.logits, rows.labels, 10)
    for labels in (rows.labels[:3], rows.labels.int()):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            statistics(rows.logits, labels, 7)
    operands = rows.gradient_operands()
    for number in range(3):
        for wrong in (operands[number][:3], operands[number].double()):
            given = [*operands[:number], wrong, *operands[number + 1 :]]
            with pytest.raises(RuntimeError, match="another size, dtype or device"):
                gradient(rows.logits, rows.labels, *given, 7)


def _sum_of_padding(logits, labels, true_width):
    return cross_entropy_statistics_reference(logits, labels, logits.shape[1])


def _sum_in_half_precision(logits, labels, true_width):
    made = cross_entropy_statistics_reference(logits, labels, true_width)
    made[1] = (logits[:, :true_width] - made[0].to(logits.dtype)[:, None]).exp().sum(1)
    return made


def _gradient_without_label(logits, labels, shift, scale, at_label, true_width):
    none = torch.zeros_like(at_label)
    cross_entropy_gradient_reference(logits, labels, shift, scale, none, true_width)


def _gradient_without_z_loss(logits, labels, shift, scale, at_label, true_width):
    total = (logits[:, :true_width].to(shift.dtype) - shift[:, None]).exp().sum(1)
    cross_entropy_gradient_reference(logits, labels, shift, at_label / total, at_label, true_width)


def _gradient_of_padding(logits, labels, shift, scale, at_label, true_width):
    columns = logits.shape[1]
    cross_entropy_gradient_reference(logits, labels, shift, scale, at_label, columns)


@pytest.mark.parametrize(
    "wrong",
    [
        {"statistics": _sum_of_padding},
        {"statistics": _sum_in_half_precision},
        {"gradient": _gradient_without_label},
        {"gradient": _gradient_without_z_loss},
        {"gradient": _gradient_of_padding},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_the_law_sees_a_wrong_kernel(wrong):
    rows = Rows.draw((9, 33, 29), torch.bfloat16)
    check_rows(rows, cross_entropy_statistics_reference, cross_entropy_gradient_reference)
    with pytest.raises(AssertionError):
        check_rows(rows, **wrong)
