"""Products of rows have the bits of the row alone, and are those of `F.linear`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops import row_products as row_products_module
from megatron.ops.row_products import (
    RowProduct,
    in_use,
    is_offered,
    linear_rows,
    padded_rows,
    product_in_use,
    row_products,
)
from tests.support.examples import examples

# Sums of 96 products of numbers near 1, rounded once to the dtype and added in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_its_bits_among_any_number_of_rows(dtype: torch.dtype, pack: bool) -> None:
    rows, weight = random(130, 96, dtype=dtype), random(72, 96, dtype=dtype, seed=1)
    bias = random(72, dtype=dtype, seed=2)
    assert is_offered(weight)
    product = RowProduct(weight, pack=pack)
    whole = product(rows, bias)
    expected = F.linear(rows.float(), weight.float(), bias.float())
    torch.testing.assert_close(
        whole.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for count in (1, 2, 3, 7, 16, 60):
        for first in (0, 5):
            part = product(rows[first : first + count], bias)
            assert torch.equal(part, whole[first : first + count]), count


def test_packed_weights_are_those_of_the_kernels_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(row_products_module, "pack_weight", lambda w: [taken.append("ours"), w][1])
    onednn = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_reorder_linear_weight",
        lambda *given: [taken.append("oneDNN"), onednn(*given)][1],
    )
    for instructions in ("avx512", None):
        monkeypatch.setattr(row_products_module.library, "INSTRUCTION_SET", instructions)
        RowProduct(random(8, 16), pack=True)
        RowProduct(random(8, 16), pack=False)
    assert taken == ["ours", "oneDNN"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_its_bits_without_our_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_products_module.library, "INSTRUCTION_SET", None)
    rows, weight = random(40, 96, dtype=dtype), random(72, 96, dtype=dtype, seed=1)
    product = RowProduct(weight, pack=True)
    for count in (1, 2, 3, 17):
        assert torch.equal(product(rows[:count]), product(rows)[:count])


@pytest.mark.parametrize("pack", [True, False])
def test_a_dtype_that_onednn_does_not_multiply_here_is_left_to_pytorch(
    pack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_products_module.library, "INSTRUCTION_SET", None)
    monkeypatch.setattr(row_products_module, "onednn_multiplies", lambda dtype: False)
    for name in ("_linear_pointwise", "_reorder_linear_weight"):
        monkeypatch.setattr(torch.ops.mkldnn, name, None)
    rows, weight = random(5, 96), random(72, 96, seed=1)
    assert torch.equal(RowProduct(weight, pack=pack)(rows), F.linear(rows, weight))


def test_rows_of_any_shape_keep_it() -> None:
    weight = random(8, 16)
    product = RowProduct(weight, pack=True)
    for shape in ((16,), (3, 16), (1, 1, 16), (2, 3, 16), (0, 16)):
        rows = random(*shape)
        torch.testing.assert_close(product(rows), F.linear(rows, weight))


@given(st.integers(1, 10_000))
@examples(200)
def test_less_than_an_eighth_of_rows_is_added(count: int) -> None:
    padded = padded_rows(count)
    assert max(2, count) <= padded < max(3, count * 9 / 8)
    assert padded_rows(padded) == padded


def test_steps_of_any_size_multiply_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    product, seen = RowProduct(random(8, 16), pack=False), set()
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def counted(rows: Tensor, *more: object) -> Tensor:
        seen.add(len(rows))
        return multiply(rows, *more)  # type: ignore[no-any-return]

    onednn = SimpleNamespace(default=counted)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", onednn)
    for count in range(1, 513):
        assert product(random(count, 16)).shape == (count, 8)
    assert seen == {padded_rows(count) for count in range(1, 513)}
    assert len(seen) <= 55  # 15 of up to 16 rows, 8 for each doubling behind


def test_each_group_has_its_own_matrix() -> None:
    weights, rows = random(3, 8, 16), random(5, 16)
    product = RowProduct(weights, pack=True)
    for group in range(3):
        torch.testing.assert_close(product(rows, group=group), F.linear(rows, weights[group]))


def test_a_weight_that_was_not_packed_is_read_where_it_is_now() -> None:
    weights, rows = torch.nn.Parameter(random(2, 8, 16), requires_grad=False), random(5, 16)
    product = RowProduct(weights, pack=False)
    weights.data = random(2, 8, 16, seed=1)
    for group in range(2):
        torch.testing.assert_close(product(rows, group=group), F.linear(rows, weights[group]))


def test_products_are_used_inside_the_block_alone() -> None:
    weight, rows = torch.nn.Parameter(random(8, 16)), random(3, 16)
    wide = torch.nn.Parameter(random(8, 16).double())
    products = row_products([weight, wide], pack=False)
    assert products.weights == [weight]  # there is none of float64
    with torch.no_grad(), in_use(products):
        assert product_in_use(weight) is products.products[0]
        assert torch.equal(linear_rows(rows, weight, None), products.products[0](rows))
    with in_use(None):
        assert product_in_use(weight) is None
    assert product_in_use(weight) is None
    assert torch.equal(linear_rows(rows, weight, None), F.linear(rows, weight))


def test_products_are_stale_when_a_weight_has_changed() -> None:
    weights = [torch.nn.Parameter(random(8, 16), requires_grad=False) for _ in range(2)]
    products = row_products(weights, pack=True)
    assert not products.are_stale(weights)
    assert products.are_stale(weights[:1])
    weights[1].mul_(2.0)
    assert products.are_stale(weights)
