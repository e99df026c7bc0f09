"""Masks, positions and segments equal those of a loop over the tokens of a row."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.loading.gpt_batch import GPTBatch
from megatron.data.loading.packed_batch import PackedBatch, packed_batch, span_corruption_batch
from tests.support.examples import examples

PAD = 0


@st.composite
def rows(draw, width=14):
    """A row of documents (inputs, targets) and padding, as three lists."""
    text, segments, inputs = [], [], []
    for segment in range(1, draw(st.integers(1, 5)) + 1):
        given_, learned = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        if len(text) + given_ + learned > width:
            break
        text += draw(
            st.lists(st.integers(0, 5), min_size=given_ + learned, max_size=given_ + learned)
        )
        segments += [segment] * (given_ + learned)
        inputs += [1] * given_ + [0] * learned
    padding = width - len(text)
    return text + [PAD] * padding, segments + [0] * padding, inputs + [0] * padding


def naive(row, reset):
    """(loss mask, position, document, prefix) of each token but the last."""
    text, segments, inputs = row
    result = []
    for place in range(len(text) - 1):
        following = place + 1
        counts = (
            segments[following] != 0
            and segments[following] == segments[place]
            and not inputs[following]
        )
        position = place - segments.index(segments[place]) if reset else place
        prefix = bool(inputs[place]) and segments[place] != 0
        result.append((float(counts), position, segments[place], float(prefix)))
    return result


@examples(200)
@given(st.lists(rows(), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_a_batch_is_what_a_loop_over_its_tokens_says(drawn, reset, prefix_lm):
    text, segments, inputs = (torch.tensor(part) for part in zip(*drawn, strict=True))
    batch = packed_batch(text, segments, inputs, prefix_lm=prefix_lm, reset_position_ids=reset)
    expected = torch.tensor([naive(row, reset) for row in drawn], dtype=torch.float64)
    assert torch.equal(batch.tokens, text[:, :-1])
    assert torch.equal(batch.labels, text[:, 1:])
    assert torch.equal(batch.loss_mask.double(), expected[..., 0])
    assert torch.equal(batch.position_ids.double(), expected[..., 1])
    assert torch.equal(batch.document_ids.double(), expected[..., 2])
    if prefix_lm:
        assert batch.is_prefix is not None
        assert torch.equal(batch.is_prefix.double(), expected[..., 3])
    else:
        assert batch.is_prefix is None
    assert all(tensor.is_contiguous() for tensor in batch if tensor is not None)
    assert (batch.loss_mask.dtype, batch.position_ids.dtype) == (torch.float32, torch.int64)


def test_a_row_by_hand():
    batch = packed_batch(
        torch.tensor([[6, 7, 8, 3, 4, 5, PAD, PAD]]),
        torch.tensor([[1, 1, 1, 2, 2, 2, 0, 0]]),
        torch.tensor([[1, 1, 0, 1, 0, 0, 0, 0]]),
        prefix_lm=True,
    )
    assert batch.loss_mask.tolist() == [[0, 1, 0, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    assert batch.document_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0]]
    assert batch.is_prefix is not None
    assert batch.is_prefix.tolist() == [[True, True, False, True, False, False, False]]


def test_a_pad_token_within_a_document_is_learned():
    batch = packed_batch(
        torch.tensor([[6, 7, PAD, PAD]]), torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 0, 0]])
    )
    assert batch.loss_mask.tolist() == [[1, 1, 0]]


def test_corrupted_spans_are_one_document_of_which_the_targets_count():
    batch = span_corruption_batch(torch.tensor([[5, 90, 6, 99]]), torch.tensor([[90, 7, 8, 99]]))
    assert batch.tokens.tolist() == [[5, 90, 6, 99, 90, 7, 8]]
    assert batch.labels.tolist() == [[90, 6, 99, 90, 7, 8, 99]]
    assert batch.loss_mask.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [list(range(7))]
    assert batch.document_ids.tolist() == [[1] * 7]
    assert batch.is_prefix is not None
    assert batch.is_prefix.tolist() == [[True] * 4 + [False] * 3]
    causal = span_corruption_batch(torch.tensor([[5]]), torch.tensor([[6]]), prefix_lm=False)
    assert causal.is_prefix is None


def test_a_packed_batch_begins_like_a_gpt_batch():
    assert PackedBatch._fields[: len(GPTBatch._fields)] == GPTBatch._fields
