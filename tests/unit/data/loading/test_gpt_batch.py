"""Masks and positions equal those of a loop over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.loading.gpt_batch import decoder_batch, gpt_batch, truncate_batch
from megatron.data.loading.packed_batch import packed_batch, span_corruption_batch
from megatron.errors import ConfigError
from tests.support.examples import examples

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


@examples(150)
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


# ---- by the kind of dataset


def flags(**changes):
    return DataConfig(seq_length=6, data_path=("p",), **changes)


def test_windows_are_cut_as_the_flags_say():
    text = torch.tensor([[1, EOD, 2, 3, EOD, 4, 5]])
    switches = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    for kind in ({}, {"fim_data": True}):
        for on in ({}, switches):
            cut = decoder_batch({"text": text}, flags(**kind, **on), eod=EOD)
            expected = gpt_batch(text, eod=EOD, **on)
            assert all(
                (one is None and other is None) or torch.equal(one, other)
                for one, other in zip(cut, expected, strict=True)
            )


@pytest.mark.parametrize("kind", [{"sft": True}, {"mtf": True}])
def test_only_what_is_learned_of_a_row_counts(kind):
    raw = {
        "text": torch.tensor([[11, 12, 13, 21, 22, 23, 9]]),
        "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 0]]),
        "is_input": torch.tensor([[1, 1, 0, 1, 0, 0, 0]]),
    }
    cut = decoder_batch(raw, flags(**kind), eod=None)
    assert cut.tokens.tolist() == [[11, 12, 13, 21, 22, 23]]
    assert cut.labels.tolist() == [[12, 13, 21, 22, 23, 9]]
    # 13 after 12; not 21, which is another document's; 22 and 23; not the padding.
    assert cut.loss_mask.tolist() == [[0, 1, 0, 1, 1, 0]]
    assert cut.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert cut.document_ids.tolist() == [[1, 1, 1, 2, 2, 2]]
    assert all(
        torch.equal(one, other) for one, other in zip(cut, packed_batch(**raw)[:5], strict=True)
    )


def test_of_corrupted_spans_only_the_targets_count():
    raw = {
        "input_tokens": torch.tensor([[1, 90, 2]]),
        "target_tokens": torch.tensor([[90, 5, 2, 7]]),
    }
    cut = decoder_batch(raw, flags(noise_density=0.15), eod=None)
    assert cut.tokens.tolist() == [[1, 90, 2, 90, 5, 2]]
    assert cut.loss_mask.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert cut.document_ids is None
    whole = span_corruption_batch(raw["input_tokens"], raw["target_tokens"], prefix_lm=False)
    assert torch.equal(cut.labels, whole.labels)


def test_a_shortened_row_keeps_the_token_after_its_last_one():
    raw = truncate_batch({"text": torch.arange(12).view(2, 6)}, 3)
    batch = gpt_batch(raw["text"], eod=None)
    assert batch.tokens.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch.labels.tolist() == [[1, 2, 3], [7, 8, 9]]
