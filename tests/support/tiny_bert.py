"""Runs of a BERT, and of a retriever, small enough for a test; see `tests.support.tiny`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config.run import RunConfig
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from pretrain_bert import bert_task
from pretrain_ict import ict_task
from tests.support.tiny import Record, tiny_run, train

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = 50
TOKENS_PER_SAMPLE = 24


class TinySentences(NamedTuple):
    """A corpus split into sentences, and the vocabulary that it is of."""

    prefix: str
    vocab_file: str


def write_tiny_sentences(folder: Path, *, documents: int = 120, seed: int = 0) -> TinySentences:
    """Documents of 2 to 6 sentences of 3 to 9 words, of which some begin like the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file = folder / "vocab.txt"
    words = [f"w{i}" if i % 3 else f"##p{i}" for i in range(_WORDS)]
    vocab_file.write_text("\n".join([*_SPECIAL, *words]) + "\n")
    random = np.random.RandomState(seed)
    prefix = folder / "tiny_text_sentence"
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            lengths = random.randint(3, 10, random.randint(2, 7)).tolist()
            tokens = (random.randint(_WORDS) + np.arange(sum(lengths))) % _WORDS
            builder.add_document(tokens + len(_SPECIAL), lengths)
    return TinySentences(str(prefix), str(vocab_file))


def tiny_bert_run(corpus: TinySentences, **flags: Any) -> RunConfig:
    """`tiny_run` with the data and the tokenizer of a BERT."""
    of_bert = {
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_size": None,
        "vocab_file": corpus.vocab_file,
        "seq_length": TOKENS_PER_SAMPLE,
        "mask_prob": 0.3,
    }
    return tiny_run(corpus.prefix, **(of_bert | flags))


def train_bert_all(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: several runs one after the other in the same processes."""
    return [train(config, bert_task(order_head=config.data.bert_binary_head)) for config in configs]


class TinyBlocks(NamedTuple):
    """A corpus split into sentences, and the titles of its documents."""

    sentences: TinySentences
    titles: str


def write_tiny_blocks(folder: Path) -> TinyBlocks:
    """The corpus of a tiny BERT, each document with a title of 1 to 3 words."""
    sentences = write_tiny_sentences(folder, documents=120)
    titles, random = folder / "tiny_title_document", np.random.RandomState(1)
    with MMapIndexedDatasetBuilder(titles, np.uint16) as builder:
        for _ in range(120):
            builder.add_document(random.randint(len(_SPECIAL), 50, random.randint(1, 4)))
    return TinyBlocks(sentences, str(titles))


def tiny_retrieval_run(blocks: TinyBlocks, **flags: Any) -> RunConfig:
    """`tiny_bert_run` with the data of the inverse cloze task."""
    of_retrieval = {"titles_data_path": blocks.titles, "mask_prob": 0.15, "seq_length": 24}
    return tiny_bert_run(blocks.sentences, **(of_retrieval | flags))


def train_retrieval_all(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: several runs one after the other in the same processes."""
    return [train(config, ict_task(config)) for config in configs]
