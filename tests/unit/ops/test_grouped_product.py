"""Products of groups in one operator against one group after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops.grouped_product import grouped_product, grouped_product_reference, is_served
from tests.support.examples import examples


@examples(40)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    sizes=st.sampled_from([(8, 16), (24, 8), (16, 40)]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_those_of_a_loop_to_the_bit(
    counts: list[int], dtype: torch.dtype, sizes: tuple[int, int], seed: int
) -> None:
    """On a CPU, where both call the same product of matrices."""
    generator, (features, outputs) = torch.Generator().manual_seed(seed), sizes

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = some(sum(counts), features).requires_grad_()
    weights = some(len(counts), outputs, features).requires_grad_()
    upstream = some(sum(counts), outputs)
    assert is_served(rows, weights)
    found = grouped_product(rows, weights, torch.tensor(counts))
    expected = grouped_product_reference(rows, weights, counts)
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (rows, weights), upstream),
        torch.autograd.grad(expected, (rows, weights), upstream),
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(3, 8, 8, dtype=torch.float64)),
        (torch.zeros(2, 8), torch.zeros(3, 8, 8, dtype=torch.bfloat16)),
        (torch.zeros(2, 6), torch.zeros(3, 8, 6)),
        (torch.zeros(2, 8, dtype=torch.float16), torch.zeros(3, 12, 8, dtype=torch.float16)),
        (torch.zeros(2, 8, device="meta"), torch.zeros(3, 8, 8, device="meta")),
    ],
    ids=["float64", "two dtypes", "odd features", "odd outputs", "as on a GPU"],
)
def test_other_kinds_are_not_served(rows: Tensor, weights: Tensor) -> None:
    assert not is_served(rows, weights)
