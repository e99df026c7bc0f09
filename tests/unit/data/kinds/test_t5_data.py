"""All kinds of data of a T5: lengths of their rows, what they refuse, and samples end to end."""

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.program_data import GPT_DATA
from megatron.data.kinds.t5_data import decoder_rows, t5_data
from megatron.data.loading.loaders import read_batch
from megatron.data.loading.t5_batch import t5_batch
from megatron.data.samples.mlm_dataset import MLMDataset
from megatron.data.samples.t5_dataset import T5Dataset
from megatron.data.samples.text_pairs import TextPairs
from megatron.errors import ConfigError
from tests.unit.data.kinds.test_dataset_makers import Vocabulary, sentences, text, with_vocabulary
from tests.unit.data.sentence_corpora import BOS, SENTINELS

SPANS = {"noise_density": 0.25, "mean_noise_span_length": 2.0, "seq_length": 18}


def flags(**changes):
    return DataConfig(**({"seq_length": 40, "data_path": ("p",)} | changes))


def data_of(**decoder):
    return t5_data(EncoderDecoderConfig(decoder_num_layers=0, **decoder))


@pytest.mark.parametrize(
    ("write", "changes", "decoder", "dataset"),
    [(sentences, {}, 24, T5Dataset), (text, SPANS, 12, MLMDataset)],
)
def test_samples_of_either_kind_become_rows_of_two_lengths(
    tmp_path, write, changes, decoder, dataset
):
    data = flags(data_path=(write(tmp_path / "c", 0),), split="1", **changes)
    reads = data_of(decoder_seq_length=decoder)
    maker = reads.maker(data, tokenizer=Vocabulary(), seed=7, is_builder=True)
    place = IndexPlace(cache_path=str(tmp_path / "cache"))
    train = build_datasets(maker, data, num_samples=(6, 0, 0), place=place).train
    assert isinstance(train, dataset)
    raw = read_batch(train, range(6)).batch
    assert all(part.dim() < 3 for part in raw.values()), "no square masks travel"
    cut = t5_batch(raw, Vocabulary(), decoder_length=decoder)
    assert cut.tokens.shape == cut.padding_mask.shape == (6, data.seq_length)
    assert cut.decoder_tokens.shape == cut.labels.shape == cut.loss_mask.shape == (6, decoder)
    assert (cut.decoder_tokens[:, 0] == BOS).all()
    counted = cut.loss_mask[:, :-1] * (cut.loss_mask[:, 1:])
    assert (cut.decoder_tokens[:, 1:] == cut.labels[:, :-1])[counted == 1].all()
    assert ((cut.labels >= 0) == (cut.loss_mask == 1)).all()
    assert (cut.labels[:, 0] == SENTINELS[0]).all()


def write_pairs(prefix):
    for part, length in (("inputs", 5), ("targets", 3)):
        with MMapIndexedDatasetBuilder(f"{prefix}_{part}_document", np.uint16) as builder:
            for number in range(10):
                builder.add_document([10 + number] * length)
    return str(prefix)


def test_pairs_become_rows_of_both_stacks(tmp_path):
    data = flags(data_path=(write_pairs(tmp_path / "c"),), split="1", mtf=True, seq_length=8)
    reads = data_of(decoder_seq_length=6)
    assert reads.kind(data) is DatasetKind.PAIRS
    assert list(reads.unread_flags(data)) == []
    maker = reads.maker(data, tokenizer=Vocabulary(), seed=7, is_builder=True)
    place = IndexPlace(cache_path=str(tmp_path / "cache"))
    train = build_datasets(maker, data, num_samples=(15, 0, 0), place=place).train
    assert isinstance(train, TextPairs)
    assert maker.epochs(train, 15) == 1.5
    cut = t5_batch(read_batch(train, range(10)).batch, Vocabulary(), decoder_length=6)
    assert cut.tokens.shape == cut.padding_mask.shape == (10, 8)
    assert (cut.padding_mask.sum(1) == 6).all()  # with the end token
    assert sorted(cut.tokens[:, 0].tolist()) == list(range(10, 20))
    assert (cut.tokens[:, 0] == cut.labels[:, 0]).all()
    assert (cut.decoder_tokens[:, 0] == BOS).all()
    assert (cut.loss_mask.sum(1) == 4).all()


def test_flags_of_masks_and_seeds_out_of_range_are_refused_for_pairs():
    reads = data_of()
    (error,) = reads.unread_flags(flags(mtf=True, mask_prob=0.3))
    assert error.found == "--mask-prob 0.3"
    with pytest.raises(ConfigError, match="seed of the sample order is out of range"):
        reads.maker(flags(mtf=True), tokenizer=Vocabulary(), seed=-1, is_builder=True)


def test_a_flag_chooses_the_kind_and_inputs_of_spans_fill_the_encoder():
    assert data_of().kind(flags()) is DatasetKind.T5
    assert data_of().kind(flags(**SPANS)) is DatasetKind.MLM
    lengths = data_of().spans(flags(**SPANS))
    assert (lengths.inputs, lengths.targets) == (18, 8)
    assert GPT_DATA.spans(flags(**{**SPANS, "seq_length": 26})).inputs == 18
    assert data_of().has_decoder
    assert not GPT_DATA.has_decoder


def test_rows_of_a_decoder_are_as_long_as_their_targets_or_as_their_flag():
    given = EncoderDecoderConfig(decoder_seq_length=30)
    assert decoder_rows(flags(), EncoderDecoderConfig()) == (40, 40)
    assert decoder_rows(flags(), given) == (30, 30)
    assert decoder_rows(flags(**SPANS), EncoderDecoderConfig()) == (9, 9)
    assert decoder_rows(flags(**SPANS), given) == (30, 9)


def test_targets_that_do_not_fit_the_decoder_are_refused_with_the_length_that_does():
    reads = data_of(decoder_seq_length=8)
    (error,) = reads.unread_flags(flags(**SPANS))
    assert error.problem == "the targets of spans do not fit the decoder"
    assert "9 tokens for --seq-length 18" in error.found
    assert "use --decoder-seq-length 9" in error.fix
    with pytest.raises(ConfigError, match="the targets of spans do not fit the decoder"):
        reads.maker(flags(**SPANS), **with_vocabulary())
    with pytest.raises(ConfigError, match="fills the sequence length exactly"):
        data_of().maker(flags(**{**SPANS, "seq_length": 4}), **with_vocabulary())


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sft": True}, "--sft True"),
        ({"fim_data": True}, "--fim-data True"),
        ({"bert_binary_head": False}, "--bert-binary-head False"),
        ({"eod_mask_loss": True}, "--eod-mask-loss True"),
        ({"mask_prob": 0.3, **SPANS}, "--mask-prob 0.3"),
    ],
)
def test_a_flag_that_a_t5_would_not_read_is_refused(changes, found):
    (error,) = data_of().unread_flags(flags(**changes))
    assert error.problem == "a flag was given that has no effect on the data of a T5"
    assert error.found == found
    assert not [*data_of().unread_flags(flags(mask_prob=0.3))]


def test_a_t5_is_not_made_without_a_tokenizer():
    with pytest.raises(ValueError, match="not made without a tokenizer"):
        data_of().maker(flags(), tokenizer=None, seed=1, is_builder=True)
