"""Rows of a table have the gradients that a dense tensor would have."""

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.context import ParallelContext
from megatron.mpu.row_gradients import RowGradients, collect_rows, lookup
from megatron.optimizer.grad_buffer import GradBuffer

IDS = torch.tensor([[3, 1, 3], [0, 3, 1]])


def a_table(dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    drawn = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.nn.Parameter(drawn.to(dtype))


def a_gradient(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    drawn = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(dtype)


def test_a_lookup_is_that_of_pytorch() -> None:
    ours, theirs = a_table(), a_table()
    assert torch.equal(lookup(IDS, ours), F.embedding(IDS, theirs))
    lookup(IDS, ours).backward(a_gradient())
    F.embedding(IDS, theirs).backward(a_gradient())
    assert torch.equal(ours.grad, theirs.grad)


def test_collected_rows_are_kept_from_autograd_and_added_once() -> None:
    ours, theirs = a_table(), a_table()
    rows = collect_rows(ours)
    lookup(IDS, ours).backward(a_gradient())
    assert ours.grad is None
    F.embedding(IDS, theirs).backward(a_gradient())
    for _ in range(2):
        total = torch.zeros(5, 4, dtype=torch.float64)
        rows.add_to(total)
        expected = theirs.grad
        torch.testing.assert_close(total, expected, rtol=1e-15, atol=1e-15)
        theirs.grad = torch.zeros_like(expected)


def test_rows_are_added_in_the_dtype_of_the_sum() -> None:
    rows, total = RowGradients(), torch.zeros(5, 4)
    rows.add(torch.zeros(300, dtype=torch.int64), torch.full((300, 4), 1.0, dtype=torch.bfloat16))
    rows.add_to(total)
    assert total[0].tolist() == [300.0] * 4  # in bfloat16 256 + 1 is 256
    assert not total[1:].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_buffer_adds_rows_of_every_pass_to_other_gradients(
    dtype: torch.dtype, tied: bool
) -> None:
    ours, theirs = a_table(dtype), a_table(dtype)
    buffer = GradBuffer(
        [("table", ours)], ParallelContext.single().replicas, gradient_dtype=torch.float32
    )
    for _ in range(2):  # steps, of two passes each
        buffer.start_step(2)
        theirs.grad = None
        for _ in range(2):
            for table, look in ((ours, lookup), (theirs, F.embedding)):
                total = (look(IDS, table) * a_gradient(dtype)).sum()
                if tied:
                    total = total + (table * 0.5).sum()
                total.backward()
        buffer.finish()
        # Of half precision torch rounds every sum, ours none.
        tolerance = 0.02 if dtype == torch.bfloat16 else 1e-14
        found = ours.main_grad.to(theirs.grad.dtype)
        torch.testing.assert_close(found, theirs.grad, rtol=tolerance, atol=tolerance)
        assert bool(found[[2, 4]].any()) == tied
