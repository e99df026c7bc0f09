"""The law of kernels for activations: each computes what its reference means in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.activation import (
    ActivationKind,
    activate,
    activate_backward_reference,
    activate_reference,
    gated_unit,
)
from tests.laws.kernels.activations import DTYPES, KERNEL, SHAPES, check_kind, draw
from tests.support.examples import examples

of_kinds = pytest.mark.parametrize("kind", ActivationKind, ids=lambda kind: kind.name.lower())


@of_kinds
def test_kernels_compute_what_the_reference_means(kind):
    for number, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            for gated in (False, True):
                check_kind(kind, *draw(shape, dtype, gated=gated, seed=number), gated=gated)


@given(
    kind=st.sampled_from(ActivationKind),
    rows=st.lists(st.integers(0, 9), max_size=2),
    width=st.integers(0, 150),
    gated=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(
    kind, rows, width, gated, dtype, seed
):
    shape = (*rows, 2 * width)
    check_kind(kind, *draw(shape, dtype, gated=gated, seed=seed), gated=gated)


def test_strides_make_no_difference():
    grad, x = draw((6, 20), torch.float32, gated=True)
    across, of_sum = x.t().contiguous().t(), grad[:, :1].expand(6, 10)
    assert not across.is_contiguous()
    kind = ActivationKind.SILU
    check_kind(kind, of_sum, across, gated=True)
    assert torch.equal(gated_unit(across, kind), gated_unit(x, kind))


@of_kinds
def test_infinity_and_nan_pass_through(kind):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4, -1e4, 0.0])
    out = activate(x, kind)
    expected = activate_reference(x, kind, False)
    assert torch.equal(out.isnan()[:2], expected.isnan()[:2])
    torch.testing.assert_close(out[3:], expected[3:], rtol=1e-6, atol=1e-30)


@of_kinds
def test_gradients_are_those_of_finite_differences(kind):
    _, x = draw((3, 6), torch.float64, gated=False)
    x = (x / 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: activate(x, kind), x)
    assert torch.autograd.gradcheck(lambda x: gated_unit(x, kind), x)


def test_operators_keep_the_promises_of_their_schemas():
    for gated in (False, True):
        grad, x = draw((3, 6), torch.float32, gated=gated)
        torch.library.opcheck(KERNEL.activate_backward.default, (grad, x, 1, gated))
        torch.library.opcheck(KERNEL.activate_backward_.default, (grad, x.clone(), 1, gated))
        torch.library.opcheck(KERNEL.activate.default, (x.requires_grad_(), 1, gated))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    x = torch.zeros(4, 6)
    with pytest.raises(RuntimeError, match="no activation of this number"):
        KERNEL.activate(x, 5, False)
    with pytest.raises(RuntimeError, match="rows of two halves"):
        KERNEL.activate(x[:, :5], 0, True)
    for grad in (torch.zeros(4, 6), torch.zeros(4, 3).double(), torch.zeros(3, 3)):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL.activate_backward(grad, x, 0, True)
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL.activate_backward_(grad, x, 0, True)
    with pytest.raises(RuntimeError, match="takes the place of a contiguous input"):
        KERNEL.activate_backward_(torch.zeros(6, 2), x.t(), 0, True)


def _second_half_activated(x, kind, gated):
    return activate_reference(torch.cat(x.chunk(2, -1)[::-1], -1), kind, gated)


def _rounded_between(x, kind, gated):
    gate, up = x.chunk(2, -1)
    return activate_reference(gate, kind, False) * up


def _gate_forgotten(grad, x, kind, gated):
    made = activate_backward_reference(grad, x, kind, gated)
    made[..., : made.shape[-1] // 2] = 0
    return made


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": _second_half_activated},
        {"forward": _rounded_between},
        {"backward": _gate_forgotten},
    ],
    ids=lambda wrong: next(iter(wrong.values())).__name__,
)
def test_the_law_sees_a_wrong_kernel(wrong):
    grad, x = draw((33, 130), torch.bfloat16, gated=True)
    right = {"forward": activate_reference, "backward": activate_backward_reference}
    check_kind(ActivationKind.SILU, grad, x, gated=True, **right)
    with pytest.raises(AssertionError):
        check_kind(ActivationKind.SILU, grad, x, gated=True, **(right | wrong))
