"""Parts of attention add up to all of it, forward and backward, whatever a row sees of a part."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops import attention_blocks
from megatron.ops.attention_blocks import (
    add_sinks_,
    attend_block,
    attend_block_gradients,
    attend_block_reference,
    block_gradients_reference,
    merge_,
    sink_gradients,
)
from tests.support.examples import examples

# Sums in another order, of float64.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def operands(queries: int, keys: int, *, heads: int = 4, groups: int = 2) -> list[Tensor]:
    shapes = [(2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


def in_two_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, at: int, grad: Tensor
) -> tuple[Tensor, ...]:
    """The output of keys before and from `at`, and the gradients, each computed in two parts."""
    parts = slice(0, at), slice(at, None)
    given = [(k[:, :, part], v[:, :, part], mask[..., part]) for part in parts]
    out, sums = attend_block(q, *given[0], causal=False)
    merge_(out, sums, *attend_block(q, *given[1], causal=False))
    of_q, of_k, of_v = zip(
        *(
            attend_block_gradients(grad, (q, keys, values), out, sums, masked, causal=False)
            for keys, values, masked in given
        )
    )
    return out, sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)


@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 10**6), st.sampled_from([1.0, 60.0]))
@examples(80)
def test_parts_add_up_to_the_whole(queries: int, keys: int, seed: int, size: float) -> None:
    """Scores up to hundreds, and rows that see nothing of one part."""
    torch.manual_seed(seed)
    q, k, v = operands(queries, keys)
    q *= size
    mask = torch.rand(2, 1, queries, keys) < 0.4
    mask[..., 0] = True  # every row sees a key of the first part
    at, grad = 1 + seed % (keys - 1), torch.randn_like(q)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = naive(*leaves, mask)
    gradients = torch.autograd.grad(expected, leaves, grad)
    for found, wanted in zip(in_two_parts(q, k, v, mask, at, grad), (expected, *gradients)):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-10 * size)


@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([1.0, 60.0]))
@examples(40)
def test_a_sink_is_a_key_whose_value_is_zero(length: int, seed: int, size: float) -> None:
    """Sinks up to hundreds above and below the scores, and rows that see one key alone."""
    torch.manual_seed(seed)
    q, k, v = operands(length, length)
    sinks, grad = size * torch.randn(4, dtype=torch.float64), torch.randn_like(q)
    q *= size
    out, sums = attend_block(q, k, v, None, causal=True)
    add_sinks_(out, sums, sinks)
    found = (
        *attend_block_gradients(grad, (q, k, v), out, sums, None, causal=True),
        sink_gradients(grad, out, sums, sinks),
    )
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    of_heads = [t.repeat_interleave(2, 1) for t in leaves[1:3]]
    scores = leaves[0] @ of_heads[0].transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    column = leaves[3][:, None, None].expand(2, 4, length, 1)
    shares = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    expected = shares @ of_heads[1]
    torch.testing.assert_close(out, expected.detach(), rtol=1e-9, atol=1e-10)
    for one, wanted in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10 * size)


def test_a_row_without_keys_has_no_weight() -> None:
    q, k, v = operands(3, 2)
    mask = torch.tensor([True, False]).expand(2, 1, 3, 2).clone()
    mask[:, :, 1] = False
    out, sums = attend_block(q, k, v, mask, causal=False)
    assert (sums[:, :, 1] == -torch.inf).all()
    assert not out[:, :, 1].any()
    assert torch.isfinite(sums[:, :, [0, 2]]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_what_the_kernel_computes(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves CUDA where no kernel returns the sums."""
    q, k, v = operands(5, 5, groups=4)
    bias = None if causal else torch.randn(1, 4, 5, 5, dtype=torch.float64)
    out, sums = attend_block(q, k, v, bias, causal=causal)
    plain = attend_block_reference(q, k, v, bias, causal=causal)
    for found, wanted in zip(plain, (out, sums)):
        torch.testing.assert_close(found, wanted, **EXACT)
    grad = torch.randn_like(q)
    by_kernel = attend_block_gradients(grad, (q, k, v), out, sums, bias, causal=causal)
    by_formula = block_gradients_reference(grad, q, k, v, out, sums, bias, causal=causal)
    for found, wanted in zip(by_formula, by_kernel):
        torch.testing.assert_close(found, wanted, **EXACT)
    assert "attend_block_reference" in vars(attention_blocks)


def test_half_precision_keeps_the_sums_in_fp32() -> None:
    q, k, v = (t.to(torch.bfloat16) for t in operands(4, 4))
    out, sums = attend_block(q, k, v, None, causal=True)
    assert (out.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
