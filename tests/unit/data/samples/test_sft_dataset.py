"""Dialogues come back with the masks they were written with, whole, and never without them."""

import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import OnTooLong
from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.data_utils import DocumentSlice, IndexPlace, build_train_valid_test_datasets
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.dataset_makers import PackedRows
from megatron.data.loading.packed_batch import packed_batch
from megatron.data.samples.chat_template import EncodedDialogue
from megatron.data.samples.sft_dataset import (
    PARTS,
    SFTCorpus,
    SFTCorpusBuilder,
    SFTDataset,
    part_prefix,
)
from megatron.errors import DataError, MachineError
from tests.support.examples import examples
from tests.unit.data.corpora import METADATA, cache_in, write_corpus

PAD = 0


def dialogue(tokens, mask):
    return EncodedDialogue(np.array(tokens, np.int64), np.array(mask, np.uint8))


def write(prefix, dialogues):
    with SFTCorpusBuilder(str(prefix), np.uint16, metadata=METADATA) as builder:
        for tokens, mask in dialogues:
            builder.add(dialogue(tokens, mask))
    return str(prefix)


def make(prefix, folder, **changes):
    corpus = SFTCorpus(prefix)
    options = {
        "documents": DocumentSlice(name="train", start=0, stop=len(corpus)),
        "num_samples": 4,
        "seq_length": 11,
        "seed": 1234,
        "pad": PAD,
        "cache": cache_in(folder),
    }
    return SFTDataset(corpus, **(options | changes))


TURNS = st.lists(st.tuples(st.integers(1, 4999), st.integers(0, 1)), min_size=1, max_size=12)
DIALOGUES = st.lists(
    TURNS.map(lambda turns: tuple(zip(*turns, strict=True))), min_size=1, max_size=8
)


@examples(20)
@given(DIALOGUES, st.integers(0, 1000))
def test_rows_are_whole_dialogues_of_which_the_masked_tokens_count(
    tmp_path_factory, dialogues, seed
):
    folder = tmp_path_factory.mktemp("sft")
    dataset = make(write(folder / "p", dialogues), folder, seed=seed)
    corpus = dataset.source
    for number, (tokens, mask) in enumerate(dialogues):
        document = corpus.document(number)
        assert document.tokens.tolist() == list(tokens)
        assert document.is_input.tolist() == [not learned for learned in mask]
    for index in range(len(dataset)):
        sample = dataset[index]
        learned = 0
        for segment in range(1, sample["segment_ids"].max() + 1):
            here = sample["segment_ids"] == segment
            found = (
                tuple(sample["text"][here].tolist()),
                tuple((1 - sample["is_input"][here]).tolist()),
            )
            assert found in dialogues
            learned += sum(found[1][1:])  # nothing predicts the first token of a dialogue
        batch = packed_batch(**{key: torch.from_numpy(row)[None] for key, row in sample.items()})
        assert int(batch.loss_mask.sum()) == learned
        assert batch.position_ids[0, 0] == 0
        assert set(sample["text"][sample["segment_ids"] == 0].tolist()) <= {PAD}


def test_positions_start_again_with_every_dialogue(tmp_path):
    dataset = make(write(tmp_path / "p", [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])]), tmp_path)
    batch = packed_batch(**{key: torch.from_numpy(row)[None] for key, row in dataset[0].items()})
    for segment in batch.document_ids.unique():
        positions = batch.position_ids[batch.document_ids == segment]
        assert positions.tolist() == list(range(len(positions)))


def test_the_builder_counts_what_it_writes(tmp_path):
    with SFTCorpusBuilder(str(tmp_path / "p"), np.uint16, metadata=METADATA) as builder:
        builder.add(dialogue([1, 2, 3], [0, 1, 1]))
        builder.add(dialogue([4], [0]))
    assert (builder.num_dialogues, builder.num_tokens, builder.num_targets) == (2, 4, 2)
    corpus = SFTCorpus(str(tmp_path / "p"))
    assert len(corpus) == 2
    assert corpus.lengths.tolist() == [3, 1]
    assert corpus.tokens.metadata is not None
    assert corpus.mask.metadata is not None
    assert corpus.tokens.metadata.vocab_size == METADATA.vocab_size
    assert (corpus.mask.metadata.vocab_size, corpus.mask.metadata.json_key) == (2, "mask")


def test_a_mask_of_another_length_is_a_bug(tmp_path):
    with SFTCorpusBuilder(str(tmp_path / "p"), np.uint16, metadata=METADATA) as builder:
        for tokens, mask in (([1, 2], [1]), ([1], [2])):
            with pytest.raises(ValueError, match="each 0 or 1"):
                builder.add(dialogue(tokens, mask))
        builder.add(dialogue([1], [1]))


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):  # noqa: SIM117, PT012
        with SFTCorpusBuilder(str(tmp_path / "p"), np.uint16, metadata=METADATA) as builder:
            builder.add(dialogue([1], [1]))
            raise RuntimeError("stop")
    with pytest.raises(DataError, match="would hold nothing"):
        write(tmp_path / "p", [])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("part", PARTS)
def test_when_one_half_cannot_be_finished_neither_is_there(part, tmp_path, monkeypatch):
    real = MMapIndexedDatasetBuilder.finalize

    def full_disk(self):
        if self.prefix == part_prefix(tmp_path / "p", part):
            raise MachineError("cannot write", fix="make room")
        real(self)

    monkeypatch.setattr(MMapIndexedDatasetBuilder, "finalize", full_disk)
    with pytest.raises(MachineError, match="cannot write"):
        write(tmp_path / "p", [([1], [1])])
    assert os.listdir(tmp_path) == []


def test_a_dataset_travels_to_a_worker(tmp_path):
    dataset = make(write(tmp_path / "p", [([5, 6], [0, 1])]), tmp_path)
    other = pickle.loads(pickle.dumps(dataset))
    assert other.fingerprint() == dataset.fingerprint()
    assert other[1]["is_input"].tolist() == dataset[1]["is_input"].tolist()


@pytest.mark.parametrize("part", PARTS)
def test_a_touched_corpus_of_the_two_is_found(part, tmp_path):
    dataset = make(write(tmp_path / "p", [([5, 6], [0, 1])]), tmp_path)
    dataset.check_unchanged()
    with open(f"{part_prefix(tmp_path / 'p', part)}.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match="changed"):
        dataset.check_unchanged()


def test_a_long_dialogue_is_refused_unless_asked_otherwise(tmp_path):
    long, short = (list(range(1, 21)), [0] * 10 + [1] * 10), ([7, 8], [0, 1])
    prefix = write(tmp_path / "p", [long, short])
    with pytest.raises(DataError, match="longer than a row") as raised:
        make(prefix, tmp_path)
    assert "1 of 2, the longest with 20 tokens" in str(raised.value)
    cut = make(prefix, tmp_path, on_too_long=OnTooLong.CUT)
    rows = [cut[i] for i in range(len(cut))]
    (whole,) = {tuple(row["text"].tolist()) for row in rows if row["text"][0] == 1}
    assert whole == tuple(range(1, 13))
    skipped = make(prefix, tmp_path, on_too_long=OnTooLong.SKIP)
    assert {skipped[i]["text"][0] for i in range(len(skipped))} == {7}
    with pytest.raises(DataError, match="every document"):
        make(
            prefix,
            tmp_path,
            on_too_long=OnTooLong.SKIP,
            documents=DocumentSlice(name="train", start=0, stop=1),
        )


def test_splits_share_no_dialogue(tmp_path):
    prefix = write(tmp_path / "p", [([n + 1] * 5, [0, 1, 1, 1, 1]) for n in range(20)])
    maker = PackedRows(
        kind=DatasetKind.SFT, open_corpus=MMapIndexedDataset, seq_length=11, seed=5, pad=PAD
    )
    datasets = build_train_valid_test_datasets(
        maker, data_path=(prefix,), split="70,20,10", num_samples=(9, 3, 2), place=IndexPlace()
    )
    seen = [
        {int(t) for i in range(len(split)) for t in split[i]["text"]} - {PAD} for split in datasets
    ]
    assert seen == [set(range(1, 15)), set(range(15, 19)), {19, 20}]


def test_tokens_of_other_dialogues_are_refused(tmp_path):
    prefix = write(tmp_path / "p", [([1, 2, 3], [0, 1, 1]), ([4], [1])])
    write_corpus(tmp_path / "p_tokens_document", [1, 3])
    with pytest.raises(DataError, match="not of the same dialogues") as raised:
        SFTCorpus(prefix)
    assert "preprocess_sft.py" in raised.value.fix


def test_what_is_no_mask_is_refused(tmp_path):
    prefix = str(tmp_path / "p")
    write_corpus(tmp_path / "p_tokens_document", [3])
    write_corpus(tmp_path / "p_mask_document", [3])
    with pytest.raises(DataError, match="no corpus of loss masks") as raised:
        SFTCorpus(prefix)
    assert "uint16 where uint8" in str(raised.value)
    metadata = CorpusMetadata(tokenizer_type="x", vocab_size=2, eod=None)
    write_corpus(tmp_path / "p_mask_document", [3], dtype=np.uint8, metadata=metadata)
    with pytest.raises(DataError, match="no corpus of loss masks") as raised:
        SFTCorpus(prefix).document(0)
    assert "2 in item 0" in str(raised.value)


def test_the_fingerprint_changes_with_the_dialogues(tmp_path):
    one = SFTCorpus(write(tmp_path / "a", [([1, 2], [0, 1])])).fingerprint()
    other = SFTCorpus(write(tmp_path / "b", [([1, 2, 3], [0, 1, 1])])).fingerprint()
    assert one != other
