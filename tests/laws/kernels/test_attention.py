"""The law of kernels for the gradient of attention: the softmax in it, and all of it."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops import attention
from megatron.ops.attention import attend_by_products, attention_gradient_reference
from tests.laws.kernels.attentions import DTYPES, KERNEL, SHAPES, check, check_some, draw
from tests.support.examples import examples


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 70)),
    first=st.integers(0, 80),
    queries=st.integers(1, 4),
    causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@examples(120)
def test_kernels_compute_what_the_reference_means_for_any_shape(
    shape, first, queries, causal, dtype, seed
):
    check(*draw(*shape, dtype, seed), first, queries, causal)


def test_the_operator_keeps_the_promises_of_its_schema():
    scores, slopes = draw(2, 3, 5, torch.float32)
    torch.library.opcheck(KERNEL, (scores, slopes, 0.5, 1, 1, True))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    scores, slopes = draw(2, 6, 8, torch.float32)
    for wrong in ((scores[0], slopes[0]), (scores[..., ::2], slopes), (scores, slopes[..., ::2])):
        with pytest.raises(RuntimeError, match=r"not contiguous \[heads, rows, keys\]"):
            KERNEL(*wrong, 1.0, 0, 1, True)
    for first, queries in ((-1, 1), (0, 0)):
        with pytest.raises(RuntimeError, match="rows have no position"):
            KERNEL(scores, slopes, 1.0, first, queries, True)
    for other in (slopes[:1], slopes.double()):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            KERNEL(scores, other, 1.0, 0, 1, True)


def test_what_is_not_finite_is_not_hidden():
    scores, slopes = draw(1, 2, 4, torch.bfloat16)
    slopes[0, 0, 0] = torch.inf
    scores[0, 1, 1] = torch.nan
    KERNEL(scores, slopes, 1.0, 0, 1, True)
    assert not torch.isfinite(slopes[0, 0, 0])
    assert torch.isnan(scores[0, 1, 1])
    assert torch.isnan(slopes[0, 1, 1])


def _one_more_key(scores, slopes, scale, first, queries, causal):
    attention_gradient_reference(scores, slopes, scale, first + 1, queries, causal)


def _without_the_mean_of_the_logarithm(scores, slopes, scale, first, queries, causal):
    shared = scores.shape[-1] ** 0.5
    attention_gradient_reference(scores, slopes, scale, first, queries, causal)
    scores.mul_(shared)
    slopes.mul_(shared)


def _scale_forgotten(scores, slopes, scale, first, queries, causal):
    attention_gradient_reference(scores, slopes, scale, first, queries, causal)
    slopes.div_(scale)


@pytest.mark.parametrize(
    "wrong",
    [_one_more_key, _without_the_mean_of_the_logarithm, _scale_forgotten],
    ids=lambda wrong: wrong.__name__,
)
def test_the_law_sees_a_wrong_kernel(wrong):
    heads, rows, keys, first, queries, causal = SHAPES[7]
    operands = (*draw(heads, rows, keys, torch.float32), first, queries, causal)
    check(*operands, kernel=attention_gradient_reference)
    with pytest.raises(AssertionError):
        check(*operands, kernel=wrong)


# b, a, g, s, d
MODELS = ((1, 1, 1, 1, 2), (2, 3, 3, 7, 4), (2, 6, 2, 70, 16), (1, 4, 1, 33, 8), (1, 2, 2, 130, 64))


def gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], *given: Tensor
) -> tuple[Tensor, ...]:
    *leaves, grad = given
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = attend(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def drawn(
    b: int, heads: int, groups: int, length: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(length)
    shapes = [(b, heads, length, width), *[(b, groups, length, width)] * 2]
    return tuple(
        torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
        for shape in (*shapes, shapes[0])
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_rows", [512, 16])
def test_gradients_by_products_are_those_of_attention(causal: bool, block_rows: int):
    """In fp64, where a wrong sum over blocks or queries of a group cannot hide."""
    with (
        patch.object(attention, "_BLOCK_ROWS", block_rows),
        patch.object(attention, "_BLOCK_BYTES", 16 * 70 * 8 * 2),
    ):
        for shape in MODELS:
            given = drawn(*shape, torch.float64)

            def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
                scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf) if causal else scores
                return scores.softmax(-1) @ v

            found = gradients(lambda q, k, v: attend_by_products(q, k, v, causal), *given)
            for one, other in zip(found, gradients(naive, *given), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("sharpness", "length"), [(0.3, 256), (1.0, 256), (4.0, 256), (1.0, 4096)])
def test_bfloat16_is_as_near_as_that_of_the_fused_kernel(sharpness: float, length: int):
    """Twice its error at the most: equal probabilities and single ones, scores of 0.3 to 50."""
    heads = 4 if length < 1024 else 2  # which share keys
    q, *others = drawn(1, heads, heads // 2, length, 64, torch.bfloat16)
    given = (q * sharpness, *others)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    expected = gradients(fused, *(t.double() for t in given))
    found = gradients(lambda q, k, v: attend_by_products(q, k, v, True), *given)
    peers = gradients(fused, *given)
    for one, other, exact in zip(found, peers, expected, strict=True):
        errors = [((t.double() - exact).norm() / exact.norm()).item() for t in (one, other)]
        assert errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize(
    ("instructions", "faster"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, (32, 1023)),
        ({"avx512_bf16": True}, (32, 1023, 1024, 4096)),
        ({"avx512_bf16": False}, ()),
    ],
)
def test_only_lengths_at_which_products_are_faster_take_them(instructions, faster):
    with patch.object(torch.cpu, "get_capabilities", lambda: instructions):
        lengths = attention._faster_lengths()
    with (
        patch.object(attention, "attend_by_products") as products,
        patch.object(attention, "_FASTER_LENGTHS", lengths),
        patch.object(attention.library, "INSTRUCTION_SET", "avx512"),
        patch.object(attention, "is_widened", lambda tensor: False),
    ):
        taken = []
        for length in (16, 32, 1023, 1024, 4096, 4097):
            for dtype in (torch.bfloat16, torch.float32):
                q, k, v, _ = drawn(1, 1, 1, length, 8, dtype)
                products.reset_mock()
                attention.attend(q, k, v, causal=True)
                taken += [(length, dtype)] * products.called
    assert taken == [(length, torch.bfloat16) for length in faster]
