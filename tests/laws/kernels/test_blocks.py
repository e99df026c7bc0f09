"""The law of kernels for attention to keys and values in blocks, whose rows keep their bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.laws.kernels.blocks import CASES, DTYPES, KERNEL, Case, check, check_bits, check_some
from tests.support.examples import examples

PARTS = st.lists(st.sampled_from([1, 1, 2, 5, 16, 33]), min_size=1, max_size=3).map(tuple)


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    case=st.builds(
        Case,
        parts=st.lists(PARTS, min_size=1, max_size=3).map(tuple),
        groups=st.integers(1, 2),
        queries=st.integers(1, 5),
        width=st.sampled_from([16, 32, 48]),
        block=st.sampled_from([16, 32, 48]),
        window=st.integers(0, 20),
        prefix=st.integers(0, 9),
    ),
    dtype=st.sampled_from(DTYPES),
)
@examples(80)
def test_kernels_compute_what_the_reference_means_for_any_sequences(case, dtype):
    check(case, dtype)
    check_bits(case, dtype)


def operands(dtype=torch.float32, tokens=3, width=16, block=16):
    """Return three tokens of one sequence in block 1 of two."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=random).to(dtype)
        for shape in ((tokens, 2, 2, width), (tokens, 2, width), (tokens, 2, width))
    )
    pool = torch.zeros(2, 2, block, 2, width, dtype=dtype)
    slots = torch.arange(block, block + tokens)
    return [
        q,
        k,
        v,
        pool,
        slots,
        torch.tensor([[0, 0, 0, 2 * tokens, 0, 0]]),
        torch.tensor([1]),
        0,
    ]


def test_the_operator_keeps_the_promises_of_its_schema():
    # The order of keys in a block is the kernel's own, and no part of the schema.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(KERNEL, tuple(operands()), test_utils=checks)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, lambda t: t[0], r"queries are \[t, g, n, d\]"),
        (
            0,
            lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            r"queries are \[t, g, n, d\]",
        ),
        (0, torch.Tensor.double, "float32 or bfloat16"),
        (1, lambda t: t[:2], "another size, dtype or device"),
        (2, torch.Tensor.bfloat16, "another size, dtype or device"),
        (3, lambda t: t[:, :, :, :1].contiguous(), "a tile is six numbers"),
        (3, lambda t: t[0], "blocks contiguous"),
        (3, torch.Tensor.double, "another size, dtype or device"),
        (4, torch.Tensor.int, "places of keys are contiguous int64"),
        (4, lambda t: torch.cat([t, t]), "a tile is six numbers"),
        (5, lambda t: t[:, :5].contiguous(), "a tile is six numbers"),
    ],
)
def test_kernels_refuse_operands_that_they_would_read_out_of_bounds(place, wrong, message):
    given_operands = operands()
    given_operands[place] = wrong(given_operands[place])
    with pytest.raises(RuntimeError, match=message):
        KERNEL(*given_operands)


@pytest.mark.parametrize(("width", "block"), [(24, 16), (16, 8), (528, 16), (16, 272)])
def test_kernels_refuse_sizes_that_they_have_no_room_for(width, block):
    with pytest.raises(RuntimeError, match="widths up to 512 and blocks up to 256"):
        KERNEL(*operands(width=width, block=block))


def test_what_is_not_finite_is_not_hidden():
    given_operands = operands()
    given_operands[2][1, 0, 3] = torch.nan
    found = KERNEL(*given_operands)
    assert found[1:, 0, :, 3].isnan().all()
    assert found[:, 1].isfinite().all()
    given_operands = operands()
    given_operands[1][1, 0, 3] = torch.nan
    found = KERNEL(*given_operands)
    assert found[1:, 0].isnan().all()
    assert found[0].isfinite().all()


def _one_key_more(*given_operands):
    *others, tiles, tables, window = given_operands
    tiles = tiles.clone()
    tiles[:, 1] -= (tiles[:, 1] > 0).long()
    return KERNEL(*others, tiles, tables, window)


def _without_a_window(*given_operands):
    return KERNEL(*given_operands[:-1], 0)


@pytest.mark.parametrize("wrong", [_one_key_more, _without_a_window])
def test_the_law_sees_a_wrong_kernel(wrong):
    with pytest.raises(AssertionError):
        check(CASES[3], torch.float32, kernel=wrong)
