"""Masks and positions equal what a loop over tokens says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.gpt_batch import gpt_batch
from megatron.errors import ConfigError

EOD = 0


def naive(row, reset_position_ids, eod_mask_loss):
    """One token after the other: (loss mask, position, document) of each."""
    position, document, result = 0, 0, []
    for place, token in enumerate(row[:-1]):
        result.append(
            (
                0.0 if eod_mask_loss and token == EOD else 1.0,
                position if reset_position_ids else place,
                document,
            )
        )
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    return result


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 12).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 3), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_batch_is_what_a_loop_over_its_tokens_says(rows, positions, attention, loss):
    text = torch.tensor(rows)
    batch = gpt_batch(
        text,
        eod=EOD,
        reset_position_ids=positions,
        reset_attention_mask=attention,
        eod_mask_loss=loss,
    )
    expected = torch.tensor([naive(row, positions, loss) for row in rows], dtype=torch.float64)
    assert torch.equal(batch.tokens, text[:, :-1])
    assert torch.equal(batch.labels, text[:, 1:])
    assert torch.equal(batch.loss_mask.double(), expected[..., 0])
    assert torch.equal(batch.position_ids.double(), expected[..., 1])
    if attention:
        assert batch.document_ids is not None
        assert torch.equal(batch.document_ids.double(), expected[..., 2])
        assert batch.document_ids.dtype == torch.int64
    else:
        assert batch.document_ids is None
    assert (batch.loss_mask.dtype, batch.position_ids.dtype) == (torch.float32, torch.int64)


def test_the_end_of_document_belongs_to_the_document_that_it_ends():
    batch = gpt_batch(
        torch.tensor([[5, 6, EOD, 7, EOD, EOD, 8]]),
        eod=EOD,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0]]


def test_without_flags_no_end_of_document_is_needed():
    batch = gpt_batch(torch.tensor([[0, 1, 2]]), eod=None)
    assert batch.loss_mask.tolist() == [[1, 1]]
    assert batch.position_ids.tolist() == [[0, 1]]
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()
    assert batch.position_ids.is_contiguous()


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("reset_position_ids", "--reset-position-ids"),
        ("reset_attention_mask", "--reset-attention-mask"),
        ("eod_mask_loss", "--eod-mask-loss"),
    ],
)
def test_a_flag_that_needs_an_end_of_document_is_refused_without_one(option, flag):
    with pytest.raises(ConfigError, match="without an end-of-document token") as raised:
        gpt_batch(torch.tensor([[0, 1]]), eod=None, **{option: True})
    assert flag in str(raised.value)
