"""The law of kernels for rotations by position: they compute what the reference means in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.rotary import rotate, rotate_reference, split_rotated
from tests.laws.kernels.rotations import (
    DTYPES,
    JOIN,
    KERNEL,
    SHAPES,
    SPLIT,
    check,
    check_groups,
    check_some,
    draw,
)
from tests.support.examples import examples


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    shape=st.tuples(*(st.integers(0, 4) for _ in range(4)), st.integers(0, 140)),
    share=st.floats(0, 1),
    own=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(shape, share, own, dtype, seed):
    operands = draw(shape, int(shape[-1] * share) // 2 * 2, own, dtype, seed)
    check(*operands)
    if shape[3] > 2:
        check_groups(*operands)


def test_strides_make_no_difference():
    heads, cos, sin = draw((6, 3, 2, 4, 20), 12, True, torch.float32)
    expected = rotate(heads.contiguous(), cos, sin)
    for order in ((1, 0, 2, 3, 4), (4, 3, 2, 1, 0), (2, 3, 1, 0, 4)):
        back = [order.index(dim) for dim in range(5)]
        strided = heads.permute(order).contiguous().permute(back)
        assert torch.equal(rotate(strided, cos, sin), expected)
    of_all = heads[:1, :1, :1, :1].expand(heads.shape)
    assert torch.equal(rotate(of_all, cos, sin), rotate(of_all.contiguous(), cos, sin))
    across = cos.transpose(0, 1).contiguous().transpose(0, 1)
    assert not across.is_contiguous()
    assert torch.equal(rotate(heads, across, sin), expected)
    for grouped in (of_all, heads.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)):
        check_groups(grouped, cos, sin)


def test_rotating_back_undoes_a_rotation():
    heads, cos, sin = draw((5, 2, 1, 3, 16), 10, False, torch.float64)
    turned = KERNEL(heads, cos, sin, False)
    assert not torch.allclose(turned, heads)
    torch.testing.assert_close(KERNEL(turned, cos, sin, True), heads, rtol=1e-13, atol=1e-13)


def test_gradients_are_those_of_finite_differences():
    heads, cos, sin = draw((3, 2, 2, 1, 7), 4, True, torch.float64)
    heads = heads.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), heads)
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, cos, sin), heads)
    grouped, cos, sin = draw((3, 2, 2, 4, 7), 4, True, torch.float64)
    grouped = grouped.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: split_rotated(x, cos, sin), grouped)
    assert torch.autograd.gradgradcheck(lambda x: split_rotated(x, cos, sin), grouped)


def test_the_operator_keeps_the_promises_of_its_schema():
    heads, cos, sin = draw((3, 2, 2, 1, 6), 4, False, torch.float32)
    for back in (False, True):
        torch.library.opcheck(KERNEL, (heads.clone().requires_grad_(), cos, sin, back))
        torch.library.opcheck(KERNEL, (heads, cos, sin, back))
    grouped, cos, sin = draw((3, 2, 2, 4, 6), 4, False, torch.float32)
    parts = [part.clone().requires_grad_() for part in grouped.split((2, 1, 1), 3)]
    torch.library.opcheck(SPLIT, (grouped.clone().requires_grad_(), cos, sin, False))
    torch.library.opcheck(JOIN, (*parts, cos, sin, True))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    heads, cos, sin = draw((3, 2, 2, 1, 6), 6, False, torch.float32)
    for wrong in (
        (heads[0], cos, sin),
        (heads[:2], cos, sin),
        (heads[..., :5], cos, sin),
        (heads, cos.expand(3, 3, 1, 1, 3), sin),
        (heads, cos.expand(3, 1, 2, 1, 3), sin),
        (heads, cos[..., 0], sin),
    ):
        with pytest.raises(RuntimeError, match=r"a rotation takes \[s, b, g, n, d\]"):
            KERNEL(*wrong, False)
    for wrong in ((heads, cos, sin[:2]), (heads, cos.double(), sin), (heads, cos, sin.half())):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL(*wrong, False)
    with pytest.raises(RuntimeError, match="queries, a key and a value"):
        SPLIT(heads.expand(3, 2, 2, 2, 6), cos, sin, False)
    short, narrow = heads[:2], heads[..., :4]
    for wrong in (short, narrow, heads.double(), heads.expand(3, 2, 2, 2, 6)):
        for parts in ((heads, wrong, heads), (heads, heads, wrong)):
            with pytest.raises(RuntimeError, match="another size, dtype or device"):
                JOIN(*parts, cos, sin, False)
    turned = heads.transpose(0, 2)  # as many elements
    with pytest.raises(RuntimeError, match="keys and values are those of the queries"):
        JOIN(heads, turned, heads, cos, sin, False)


def _other_way(heads, cos, sin, back):
    return rotate_reference(heads, cos, sin, not back)


def _neighbours_paired(heads, cos, sin, back):
    r = 2 * cos.shape[-1]
    apart = heads[..., :r].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = rotate_reference(apart, cos, sin, back).unflatten(-1, (2, -1))
    return torch.cat((turned.transpose(-1, -2).flatten(-2), heads[..., r:]), -1)


def _rounded_between(heads, cos, sin, back):
    half = cos.shape[-1]
    first, second, kept = heads.split((half, half, heads.shape[-1] - 2 * half), -1)
    sin = -sin if back else sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), -1)


def _angles_of_the_first_sequence(heads, cos, sin, back):
    return rotate_reference(heads, cos[:, :1], sin[:, :1], back)


@pytest.mark.parametrize(
    "wrong",
    [_other_way, _neighbours_paired, _rounded_between, _angles_of_the_first_sequence],
    ids=lambda wrong: wrong.__name__,
)
def test_the_law_sees_a_wrong_kernel(wrong):
    operands = draw(*SHAPES[6][:1], 130, True, torch.bfloat16)
    check(*operands, rotate=rotate_reference)
    with pytest.raises(AssertionError):
        check(*operands, rotate=wrong)


def _rotated_values(grouped, cos, sin, back):
    turned = rotate_reference(grouped, cos, sin, back).split((grouped.shape[3] - 2, 1, 1), 3)
    return [part.contiguous() for part in turned]


def _views_of_values(grouped, cos, sin, back):
    return *SPLIT(grouped, cos, sin, back)[:2], grouped[..., -1:, :].contiguous()[:]


def _parts_in_another_order(grouped, cos, sin, back):
    queries, keys, values = SPLIT(grouped, cos, sin, back)
    return queries, values, keys


def _joined_the_other_way(*operands):
    return JOIN(*operands[:-1], not operands[-1])


def _joined_in_another_order(*operands):
    return JOIN(*operands).roll(1, 3)


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("split", _rotated_values),
        ("split", _views_of_values),
        ("split", _parts_in_another_order),
        ("join", _joined_the_other_way),
        ("join", _joined_in_another_order),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_law_sees_wrong_groups(operator, wrong):
    operands = draw((5, 2, 3, 6, 20), 12, True, torch.float64)
    check_groups(*operands)
    with pytest.raises(AssertionError):
        check_groups(*operands, **{operator: wrong})


def test_offsets_beyond_what_32_bits_count(tmp_path):
    """Two tokens 2^31 elements apart, in a file of which only their own pages are there."""
    far, width = 2**31, 64
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2 * (far + width))
    memory = torch.from_file(str(path), shared=True, size=far + width, dtype=torch.bfloat16)
    heads, cos, sin = draw((2, 1, 1, 1, width), width, False, torch.bfloat16)
    apart = memory.as_strided(heads.shape, (far, width, width, width, 1))
    check(apart.copy_(heads), cos, sin)
    assert path.stat().st_blocks * 512 < 2**20
