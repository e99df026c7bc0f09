"""Rotation by position is complex multiplication; the law of kernels is in tests/laws."""

import pytest
import torch

from megatron.ops.rotary import (
    join_rotated_reference,
    rotate,
    rotate_reference,
    split_rotated,
    split_rotated_reference,
)


def test_the_reference_multiplies_pairs_by_complex_numbers_of_length_one():
    heads = torch.randn(4, 2, 3, 1, 10, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(4, 2, 1, 1, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.complex(heads[..., :4], heads[..., 4:8])
    for back in (False, True):
        turned = pairs * torch.polar(torch.ones_like(angles), -angles if back else angles)
        expected = torch.cat((turned.real, turned.imag, heads[..., 8:]), -1)
        found = rotate_reference(heads.detach(), cos, sin, back)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-13, atol=1e-13)
        grad = torch.randn_like(heads)
        (slope,) = torch.autograd.grad(expected, heads, grad, retain_graph=True)
        of_grad = rotate_reference(grad, cos, sin, not back)
        torch.testing.assert_close(of_grad, slope, rtol=1e-13, atol=1e-13)


def test_references_of_groups_rotate_queries_and_keys_and_undo_each_other():
    grouped = torch.randn(4, 2, 3, 5, 10, dtype=torch.float64)
    cos, sin = torch.randn(2, 4, 2, 1, 1, 4, dtype=torch.float64).sin().unbind()
    queries, keys, values = split_rotated_reference(grouped, cos, sin, False)
    turned = rotate_reference(grouped, cos, sin, False)
    assert torch.equal(torch.cat((queries, keys), 3), turned[..., :4, :])
    assert torch.equal(values, grouped[..., 4:, :])
    expected = torch.cat((rotate_reference(turned[..., :4, :], cos, sin, True), values), 3)
    assert torch.equal(join_rotated_reference(queries, keys, values, cos, sin, True), expected)


def test_half_precision_is_rounded_once():
    heads = torch.full((1, 1, 1, 1, 128), 1.01).bfloat16()
    angles = torch.linspace(0, 1, 64).reshape(1, 1, 1, 1, 64)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    first, second = heads[..., :64], heads[..., 64:]
    once = (first.float() * cos.float() - second.float() * sin.float()).bfloat16()
    assert torch.equal(rotate(heads, cos, sin)[..., :64], once)
    assert not torch.equal(once, first * cos - second * sin)


def test_nothing_but_the_tables_is_saved():
    heads = torch.randn(3, 1, 2, 1, 8, requires_grad=True)
    cos, sin = torch.ones(2, 3, 1, 1, 1, 4)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        rotate(heads, cos, sin)
        split_rotated(heads.expand(3, 1, 2, 4, 8), cos, sin)
    assert {one.data_ptr() for one in saved} == {cos.data_ptr(), sin.data_ptr()}


def test_tables_that_do_not_fit_are_refused():
    heads, table = torch.zeros(3, 2, 1, 1, 8), torch.zeros(3, 1, 1, 1, 4)
    for wrong in (
        (heads[0], table, table),
        (heads, table[:2], table[:2]),
        (heads, table.expand(3, 3, 1, 1, 4), table.expand(3, 3, 1, 1, 4)),
        (heads[..., :7], table, table),
        (heads, table, table[:1]),
        (heads, table.double(), table.double()),
        (heads, torch.tensor(1.0), torch.tensor(1.0)),
    ):
        with pytest.raises(ValueError, match=r"do not fit the heads\n  found: .*\n  fix: give"):
            rotate(*wrong)
        with pytest.raises(ValueError, match=r"do not fit the heads\n  found: .*\n  fix: give"):
            split_rotated(*wrong)
    with pytest.raises(ValueError, match=r"lacks queries, a key or a value\n  found: .*, 2, 8\)"):
        split_rotated(heads.expand(3, 2, 1, 2, 8), table, table)
