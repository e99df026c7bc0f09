"""A batch of a prefix LM counts what its flags say, as a loop over the tokens finds it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.data.loading.packed_batch import packed_batch, span_corruption_batch
from megatron.data.loading.prefix_batch import position_weights, prefix_lm_batch
from megatron.data.samples.prefix_dataset import PrefixDataset
from megatron.errors import ConfigError
from tests.support.examples import examples
from tests.unit.data.samples.test_fim import EOD, Windows


def flags(**changes):
    return DataConfig(**({"seq_length": 16, "data_path": ("p",)} | changes))


def raw_of(text, *, by_document, seed=1):
    dataset = PrefixDataset(Windows(text), eod=EOD if by_document else None, seed=seed)
    samples = [dataset[i] for i in range(len(text))]
    return {
        key: torch.stack([torch.from_numpy(sample[key]) for sample in samples])
        for key in ("text", "is_prefix")
    }


@examples(150)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_a_batch_is_what_a_loop_over_its_tokens_says(text, chosen):
    names = ("loss_on_targets_only", "reweight_loss_based_on_position_frequency")
    names += ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    on = dict(zip(names, chosen, strict=True))
    raw = raw_of(text, by_document=on["reset_attention_mask"])
    batch = prefix_lm_batch(raw, flags(**on), eod=EOD)
    for row, tokens in enumerate(text):
        document, position = 0, 0
        marks = raw["is_prefix"][row].tolist()
        for at in range(8):
            weight = 2 * (8 - at) / 9 if on[names[1]] else 1.0
            if on["loss_on_targets_only"] and marks[at + 1]:
                weight = 0.0
            if on["eod_mask_loss"] and tokens[at] == EOD:
                weight = 0.0
            assert batch.loss_mask[row, at].item() == pytest.approx(weight, rel=1e-6)
            assert batch.tokens[row, at] == tokens[at]
            assert batch.labels[row, at] == tokens[at + 1]
            assert batch.position_ids[row, at] == position
            assert batch.document_ids[row, at] == document
            assert batch.is_prefix is not None
            assert bool(batch.is_prefix[row, at]) == bool(marks[at])
            position += 1
            if tokens[at] == EOD:
                document += on["reset_attention_mask"]
                position = 0 if on["reset_position_ids"] else position
    assert all(tensor.is_contiguous() for tensor in batch if tensor is not None)


def test_the_last_token_of_a_prefix_predicts_the_first_target():
    raw = {
        "text": torch.tensor([[5, 6, 7, 8, 9]]),
        "is_prefix": torch.tensor([[1, 1, 1, 0, 0]]),
    }
    batch = prefix_lm_batch(raw, flags(loss_on_targets_only=True), eod=EOD)
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1]]
    assert prefix_lm_batch(raw, flags(), eod=EOD).loss_mask.tolist() == [[1, 1, 1, 1]]


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_weights_of_positions_fall_and_are_one_on_average(length):
    weights = position_weights(length)
    assert weights.dtype == torch.float32
    assert weights.mean().item() == pytest.approx(1.0, rel=1e-6)
    assert weights.tolist() == sorted(weights.tolist(), reverse=True)
    assert len(set(weights.tolist())) == length


def test_the_inputs_of_pairs_and_of_texts_without_spans_are_prefixes():
    pairs = {
        "text": torch.tensor([[6, 7, 8, 3, 4]]),
        "segment_ids": torch.tensor([[1, 1, 1, 2, 2]]),
        "is_input": torch.tensor([[1, 1, 0, 1, 0]]),
    }
    batch = prefix_lm_batch(pairs, flags(mtf=True), eod=EOD)
    expected = packed_batch(*pairs.values(), prefix_lm=True)
    assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))
    assert batch.is_prefix is not None
    assert batch.is_prefix.tolist() == [[True, True, False, True]]
    spans = {"input_tokens": torch.tensor([[5, 6]]), "target_tokens": torch.tensor([[7, 8]])}
    batch = prefix_lm_batch(spans, flags(noise_density=0.15), eod=EOD)
    expected = span_corruption_batch(*spans.values())
    assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))
    assert batch.is_prefix is not None
    assert batch.is_prefix.tolist() == [[True, True, False]]


def test_documents_without_an_end_cannot_be_separated():
    raw = raw_of([[5, 6, 7]], by_document=False)
    with pytest.raises(ConfigError, match="the end of a document cannot be found"):
        prefix_lm_batch(raw, flags(reset_attention_mask=True), eod=None)
