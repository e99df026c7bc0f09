"""Attention by blocks is attention under a dense mask that loops write, forward and backward."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.ops.prefix_attention import (
    PrefixSpan,
    are_faster_than_a_mask,
    attend_spans,
    prefix_spans,
)
from tests.support.examples import examples

# Sums in another order, of float64.
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# One rounding of the output of each block to bfloat16, and one of their sum: 2^-8 each, of values
# up to 3.
ROUNDED = {"rtol": 2e-2, "atol": 5e-2}

# The documents of a row as pairs of lengths: of the prefix, and of the rest.
Documents = list[tuple[int, int]]


@st.composite
def rows(draw: st.DrawFn) -> list[Documents]:
    """One to three rows of equal length: some prefixes are empty, some are whole documents."""
    length = draw(st.integers(1, 14))
    found: list[Documents] = []
    for _ in range(draw(st.integers(1, 3))):
        documents: Documents = []
        left = length
        while left:
            size = draw(st.integers(1, left))
            prefix = draw(st.integers(0, size))
            documents.append((prefix, size - prefix))
            left -= size
        found.append(documents)
    return found


def ids_of(drawn: list[Documents]) -> tuple[Tensor, Tensor]:
    """Document ids that count from 7, and marks of prefixes."""
    ids = [
        [7 + n for n, pair in enumerate(documents) for _ in range(sum(pair))] for documents in drawn
    ]
    marks = [
        [int(i < pair[0]) for pair in documents for i in range(sum(pair))] for documents in drawn
    ]
    return torch.tensor(ids), torch.tensor(marks)


def dense_mask(document_ids: Tensor, is_prefix: Tensor) -> Tensor:
    """What may be seen, [b, 1, s, s], one pair of tokens after the other."""
    b, s = document_ids.shape
    mask = torch.zeros(b, 1, s, s, dtype=torch.bool)
    for row in range(b):
        for i in range(s):
            for j in range(s):
                if document_ids[row, i] != document_ids[row, j]:
                    continue
                if j <= i or is_prefix[row, j]:
                    mask[row, 0, i, j] = True
    return mask


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


def operands(batch: int, length: int, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(batch, heads, length, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@given(rows(), st.integers(0, 10**6))
@examples(120)
def test_blocks_are_a_dense_mask(drawn: list[Documents], seed: int) -> None:
    torch.manual_seed(seed)
    ids, marks = ids_of(drawn)
    spans = prefix_spans(ids, marks)
    assert spans is not None
    given_ = operands(*ids.shape)
    out, expected = attend_spans(*given_, spans), naive(*given_, dense_mask(ids, marks))
    torch.testing.assert_close(out, expected, **EXACT)
    grad = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, given_, grad), torch.autograd.grad(expected, given_, grad)
    ):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_blocks_in_bfloat16_stay_near_the_mask() -> None:
    ids, marks = ids_of([[(20, 30), (0, 14)], [(64, 0)]])
    spans = prefix_spans(ids, marks)
    assert spans is not None
    narrow = operands(2, 64, dtype=torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in narrow]
    out, expected = attend_spans(*narrow, spans), naive(*wide, dense_mask(ids, marks))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, **ROUNDED)
    grad = torch.randn_like(out)
    of_narrow = torch.autograd.grad(out, narrow, grad)
    for ours, theirs in zip(of_narrow, torch.autograd.grad(expected, wide, grad.float())):
        torch.testing.assert_close(ours.float(), theirs, **ROUNDED)


@given(rows())
@examples(60)
def test_spans_hold_every_token_once_and_know_its_prefix(drawn: list[Documents]) -> None:
    ids, marks = ids_of(drawn)
    spans = prefix_spans(ids, marks)
    assert spans is not None
    expected = []
    for row, documents in enumerate(drawn):
        at = 0
        for prefix, rest in documents:
            expected.append(PrefixSpan(row, at, at + prefix, at + prefix + rest))
            at += prefix + rest
    assert list(spans) == expected


def test_blocks_are_chosen_where_they_leave_much_out() -> None:
    def chosen(length: int, *documents: int) -> bool:
        spans: list[PrefixSpan] = []
        for size in documents:
            start = spans[-1].stop if spans else 0
            spans.append(PrefixSpan(0, start, start + size // 2, start + size))
        assert spans[-1].stop == length
        return are_faster_than_a_mask(tuple(spans), 1, length)

    assert chosen(1024, 1024)
    assert chosen(1024, *[256] * 4)
    assert not chosen(1024, *[16] * 64)
    assert not chosen(128, 128)


@pytest.mark.parametrize(
    ("ids", "marks"),
    [([0, 0, 0], [0, 1, 0]), ([0, 0, 1, 1], [1, 0, 0, 1]), ([0, 1, 0], [0, 0, 0])],
    ids=["a prefix that begins later", "one of a second document", "a document in two places"],
)
def test_what_is_no_prefix_and_rest_has_no_spans(ids: list[int], marks: list[int]) -> None:
    assert prefix_spans(torch.tensor([ids]), torch.tensor([marks])) is None
