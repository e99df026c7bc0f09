"""Each kind of dataset by every way of naming data, in one order for any number of replicas."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from megatron.config.data import DataConfig, DataIntegrity
from megatron.data.bert_dataset import BERTDataset
from megatron.data.blendable_dataset import BlendableDataset
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.dataset_makers import bert_maker, gpt_maker, ict_maker
from megatron.data.kinds.prefix_maker import prefix_maker
from megatron.data.kinds.t5_data import masked_texts
from megatron.data.loading.loaders import build_data_loader
from megatron.data.samples.fim import FIMDataset
from megatron.data.samples.ict_dataset import ICTDataset
from megatron.data.samples.mlm_dataset import MLMDataset
from megatron.data.samples.packed_mtf_dataset import PackedMTFDataset
from megatron.data.samples.prefix_dataset import PrefixDataset
from megatron.data.samples.sft_dataset import SFTDataset
from megatron.data.samples.t5_dataset import T5Dataset
from megatron.errors import ConfigError, DataError
from tests.unit.data.corpora import random_sizes, write_corpus
from tests.unit.data.dialogues import as_pairs, random_dialogues, write_dialogues, write_pairs
from tests.unit.data.sentence_corpora import (
    BOS,
    EOS,
    SENTINELS,
    VOCAB_SIZE,
    Pieces,
    random_documents,
    write_sentences,
)

EOD = 4


class Vocabulary(Pieces):
    """A tokenizer with every token that some kind needs."""

    eod, bos, extra_ids = EOD, BOS, SENTINELS

    def piece(self, token_id):
        """One id as a vocabulary would spell it."""
        names = {EOS: "[EOS]", 40: "<fim_prefix>", 41: "<fim_suffix>", 42: "<fim_middle>"}
        return names.get(token_id, super().piece(token_id))


class Kind:
    """A kind of dataset with the flags that select it and corpora that it reads."""

    def __init__(self, dataset, make, write, **flags):
        self.dataset, self.make, self.write, self.flags = dataset, make, write, flags

    def build(self, folder, num_samples=(24, 6, 6), *, place=None, tokenizer=None, **named):
        """What a run would get that names its data by `named`."""
        data = DataConfig(**({"seq_length": 40} | self.flags | named))
        maker = self.make(data, tokenizer=tokenizer or Vocabulary(), seed=7, is_builder=True)
        place = place or IndexPlace(cache_path=str(folder / "cache"))
        return build_datasets(maker, data, num_samples=num_samples, place=place)


def text(prefix, seed):
    return write_corpus(prefix, [size + 3 for size in random_sizes(80, seed=seed)])


def chats(prefix, seed):
    return write_dialogues(prefix, random_dialogues(80, seed=seed))


def pairs(prefix, seed):
    return write_pairs(prefix, as_pairs(random_dialogues(80, seed=seed)))


def sentences(prefix, seed):
    return write_sentences(prefix, random_documents(80, seed=seed), seed=seed).prefix


KINDS = {
    "gpt": Kind(GPTDataset, gpt_maker, text),
    "fim": Kind(FIMDataset, gpt_maker, text, fim_data=True, fim_rate=1.0),
    "mlm": Kind(MLMDataset, gpt_maker, text, noise_density=0.15, seq_length=41),
    "sft": Kind(SFTDataset, gpt_maker, chats, sft=True),
    "mtf": Kind(PackedMTFDataset, gpt_maker, pairs, mtf=True),
    "prefix": Kind(PrefixDataset, prefix_maker, text, reset_attention_mask=True),
    "bert": Kind(BERTDataset, bert_maker, sentences),
    "t5": Kind(T5Dataset, partial(masked_texts, decoder_seq_length=40), sentences),
    "ict": Kind(ICTDataset, partial(ict_maker, one_sentence_documents=True), sentences),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def read(dataset):
    """The whole dataset as text, to be compared."""
    return [{key: array.tolist() for key, array in dataset[i].items()} for i in range(len(dataset))]


@every_kind
def test_a_path_is_split_and_parts_without_samples_are_not_built(kind, tmp_path):
    prefix = kind.write(tmp_path / "c", 0)
    train, valid, test = kind.build(tmp_path, (24, 6, 0), data_path=(prefix,), split="70,20,10")
    assert isinstance(train, kind.dataset)
    assert isinstance(valid, kind.dataset)
    assert test is None
    assert len(train) >= 24
    assert len(valid) >= 6
    assert train.fingerprint() != valid.fingerprint()


@every_kind
def test_corpora_are_blended_by_their_weights_and_the_blend_says_so(kind, tmp_path, capsys):
    words = ("1", kind.write(tmp_path / "a", 0), "3", kind.write(tmp_path / "b", 1))
    train = kind.build(tmp_path, (24, 0, 0), data_path=words, split="1").train
    assert isinstance(train, BlendableDataset)
    assert np.bincount(train.dataset_index).tolist() == [6, 18]
    assert all(isinstance(part, kind.dataset) for part in train.datasets)
    output = capsys.readouterr().out
    assert f"{words[1]}: weight 0.25, 6 samples (25.00%)" in output
    # Sentences of all epochs are shuffled together.
    assert ("epochs" in output) == (kind.make in (gpt_maker, prefix_maker))


@every_kind
def test_separate_paths_and_ranges_are_the_same_data_by_other_names(kind, tmp_path):
    a, b = kind.write(tmp_path / "a", 0), kind.write(tmp_path / "b", 1)
    apart = kind.build(tmp_path, train_data_path=(a,), valid_data_path=(b,), test_data_path=(b,))
    ranges = kind.build(
        tmp_path,
        train_weighted_split_paths=(f"T: 1 0:1 {a}",),
        valid_weighted_split_paths=(f"V: 1 0:1 {b}", f"W: 1 0:0.5 {a}, 2 0.5:1 {a}"),
        test_weighted_split_paths=(f"X: 1 0:1 {b}",),
    )
    assert list(ranges.valid) == ["V", "W"]
    assert read(apart.train) == read(ranges.train)
    assert read(apart.valid) == read(ranges.valid["V"])
    assert read(apart.test) == read(ranges.test["X"])


@every_kind
def test_one_two_and_four_replicas_read_one_order(kind, tmp_path):
    words = ("1", kind.write(tmp_path / "a", 0), "2", kind.write(tmp_path / "b", 1))
    train = kind.build(tmp_path, (24, 0, 0), data_path=words, split="1").train
    expected = read(train)[:24]
    for order, number in (("single", 1), ("single", 2), ("single", 4), ("cyclic", 2)):
        loaders = [
            iter(
                build_data_loader(
                    train,
                    consumed_samples=0,
                    micro_batch_size=1,
                    data_parallel_rank=rank,
                    data_parallel_size=number,
                    num_workers=0,
                    kind=order,
                    seed=7,
                )
            )
            for rank in range(number)
        ]
        seen = [
            {key: row[0].tolist() for key, row in next(loader).items()}
            for _ in range(24 // number)
            for loader in loaders
        ]
        if order == "single":
            assert seen == expected
        else:
            assert sorted(map(repr, seen)) == sorted(map(repr, expected))


@every_kind
def test_files_are_opened_and_indices_kept_as_the_flags_say(kind, tmp_path):
    prefix = kind.write(tmp_path / "c", 0)
    waits = []
    train = kind.build(
        tmp_path,
        (24, 0, 0),
        data_path=(prefix,),
        split="1",
        data_integrity=DataIntegrity.HEADER,
        mmap_bin_files=True,
        place=IndexPlace(cache_path=str(tmp_path / "there"), wait=partial(waits.append, 1)),
    ).train
    files = list(corpora_below(train))
    assert files
    assert {(file.integrity, file.mapped) for file in files} == {(DataIntegrity.HEADER, True)}
    assert waits == [1]
    assert list((tmp_path / "there").glob("*.npy"))


def corpora_below(dataset):
    """The indexed datasets that a dataset of any kind reads."""
    for name in ("dataset", "windows", "source", "samples", "tokens", "mask", "inputs", "targets"):
        if hasattr(dataset, name):
            yield from corpora_below(getattr(dataset, name))
    if hasattr(dataset, "indexed"):
        yield dataset.indexed
    elif hasattr(dataset, "integrity"):
        yield dataset


@every_kind
def test_a_seed_out_of_range_is_refused(kind):
    data = DataConfig(**({"seq_length": 40, "data_path": ("p",)} | kind.flags))
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match="seed of the sample order is out of range"):
            kind.make(data, tokenizer=Vocabulary(), seed=seed, is_builder=True)


def test_rows_are_padded_with_a_token_that_the_model_has():
    data = DataConfig(seq_length=40, data_path=("p",), sft=True)
    tokenizer = Vocabulary()
    for pad, eod, expected in ((9, 8, 9), (None, 8, 8), (None, None, 0)):
        tokenizer.pad, tokenizer.eod = pad, eod
        maker = gpt_maker(data, tokenizer=tokenizer, seed=7, is_builder=True)
        assert (maker.kind, maker.pad) == (DatasetKind.SFT, expected)


def test_plain_windows_alone_need_no_tokenizer():
    data = DataConfig(seq_length=40, data_path=("p",))
    assert gpt_maker(data, tokenizer=None, seed=7, is_builder=True).seq_length == 40
    with pytest.raises(ValueError, match="not made without a tokenizer"):
        gpt_maker(dataclasses.replace(data, sft=True), tokenizer=None, seed=7, is_builder=True)


def test_made_up_windows_are_split_like_those_of_a_corpus():
    data = DataConfig(seq_length=40, mock_data=True, split="99,1,0")
    maker = gpt_maker(data, tokenizer=Vocabulary(), seed=7, is_builder=True)
    built = build_datasets(maker, data, num_samples=(10**12, 8, 8), place=IndexPlace())
    assert (len(built.train), len(built.valid), built.test) == (10**12, 8, None)
    assert (built.train[0]["text"] != built.valid[0]["text"]).any()
    assert built.train[0]["text"].max() < VOCAB_SIZE
    untrained = dataclasses.replace(data, split="0,100,0")
    with pytest.raises(DataError, match="the train split has no share of the made-up data"):
        build_datasets(maker, untrained, num_samples=(8, 8, 8), place=IndexPlace())


def with_vocabulary(**changes):
    """A maker's arguments with a tokenizer of which something is different."""
    tokenizer = Vocabulary()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return {"tokenizer": tokenizer, "seed": 7, "is_builder": True}


@pytest.mark.parametrize(
    ("make", "flags", "changes", "message"),
    [
        (gpt_maker, {"fim_data": True}, {"eod": None}, "without an end-of-document token"),
        (gpt_maker, {"fim_data": True}, {"eod": 40}, "not four different tokens"),
        (
            gpt_maker,
            {"fim_data": True, "fim_middle_token": "<m>"},
            {},
            "does not have the tokens that mark",
        ),
        (
            gpt_maker,
            {"noise_density": 0.15, "seq_length": 41},
            {"extra_ids": ()},
            "fewer sentinel tokens than spans",
        ),
        (
            gpt_maker,
            {"noise_density": 0.15, "seq_length": 41},
            {"sep": None, "eod": None},
            "ends both sequences with a token that the tokenizer does not have",
        ),
        (gpt_maker, {"noise_density": 0.15, "seq_length": 3}, {}, "fills the sequence length"),
        (bert_maker, {}, {"mask": None}, "lacks tokens that masking needs"),
        (ict_maker, {}, {"cls": None}, "lacks tokens that masking needs"),
        (
            partial(masked_texts, decoder_seq_length=8),
            {},
            {"bos": None},
            "lacks tokens that T5 needs",
        ),
        (
            partial(masked_texts, decoder_seq_length=8),
            {},
            {"extra_ids": ()},
            "lacks tokens that T5",
        ),
    ],
)
def test_a_kind_without_its_tokens_or_lengths_is_refused(make, flags, changes, message):
    data = DataConfig(**({"seq_length": 40, "data_path": ("p",)} | flags))
    with pytest.raises(ConfigError, match=message):
        make(data, **with_vocabulary(**changes))


def test_titles_are_those_of_one_corpus(tmp_path):
    titles = write_corpus(tmp_path / "titles", [2] * 80)
    kind = Kind(ICTDataset, partial(ict_maker, titles_prefix=titles), sentences)
    prefix = kind.write(tmp_path / "c", 0)
    flags = {"split": "1", "num_samples": (24, 0, 0)}
    train = kind.build(tmp_path, data_path=(prefix,), **flags).train
    assert train.titles.prefix == titles
    other = kind.write(tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="titles are those of one corpus"):
        kind.build(tmp_path, data_path=("1", prefix, "1", other), **flags)


def test_a_split_of_sentences_is_a_range_of_documents(tmp_path):
    prefix = KINDS["bert"].write(tmp_path / "c", 0)
    train, valid, _ = KINDS["bert"].build(
        tmp_path, (24, 6, 0), data_path=(prefix,), split="70,20,10"
    )
    doc_idx = train.samples.indexed.doc_idx
    for dataset, start, stop in ((train, 0, 56), (valid, 56, 72)):
        for i in range(len(dataset)):
            first, end, _ = dataset.samples.row(i)
            assert doc_idx[start] <= first < end <= doc_idx[stop]
    with pytest.raises(DataError, match=r"the valid split of .* has no documents"):
        KINDS["bert"].build(tmp_path, (24, 6, 0), data_path=(prefix,), split="1000,0.1,0.1")


def test_the_flags_of_sentences_reach_their_samples():
    flags = {
        "seq_length": 40,
        "data_path": ("p",),
        "mask_prob": 0.3,
        "short_seq_prob": 0.0,
        "bert_binary_head": False,
    }
    data = DataConfig(**flags)
    bert = bert_maker(data, **with_vocabulary()).dataset.keywords["recipe"]
    assert (bert.masked_lm_prob, bert.short_seq_prob, bert.binary_head) == (0.3, 0.0, False)
    ict = ict_maker(data, query_in_block_prob=0.6, **with_vocabulary()).dataset.keywords["recipe"]
    assert (ict.query_in_block_prob, ict.one_sentence_documents) == (0.6, False)
    t5 = masked_texts(data, decoder_seq_length=20, **with_vocabulary()).dataset.keywords["recipe"]
    assert (t5.masked_lm_prob, t5.short_seq_prob, t5.decoder_seq_length) == (0.3, 0.0, 20)
    assert (t5.bos, t5.eos, t5.sentinels) == (BOS, EOS, SENTINELS)
    assert t5.vocabulary.size == VOCAB_SIZE
