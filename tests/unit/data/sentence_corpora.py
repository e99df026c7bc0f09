"""Corpora of sentences made on the spot, and a small vocabulary of word pieces to mask them."""

from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.samples.masking import MaskingVocabulary

VOCAB_SIZE = 200
PAD, CLS, SEP, MASK, BOS, EOS = 0, 1, 2, 3, 4, 5
SENTINELS = tuple(range(6, 36))
FIRST_WORD = 36


class Pieces:
    """A tokenizer as far as masking is concerned: every third piece continues a word."""

    vocab_size, pad, cls, sep, mask = VOCAB_SIZE, PAD, CLS, SEP, MASK

    def piece(self, token_id):
        """One id as a vocabulary would spell it."""
        continues = token_id >= FIRST_WORD and token_id % 3 == 0
        return f"##{token_id}" if continues else f"w{token_id}"


VOCABULARY = MaskingVocabulary.of(Pieces())


def write_sentences(prefix: Path, documents, *, seed=0, **options) -> MMapIndexedDataset:
    """A corpus whose documents have sentences of these lengths, filled with random words."""
    rng = np.random.RandomState(seed)
    with MMapIndexedDatasetBuilder(prefix, np.uint16, **options) as builder:
        for lengths in documents:
            builder.add_document(rng.randint(FIRST_WORD, VOCAB_SIZE, sum(lengths)), lengths)
    return MMapIndexedDataset(prefix)


def random_documents(count, *, seed=0, most_sentences=9, most_tokens=30):
    """Lengths of the sentences of `count` documents, none of them empty."""
    rng = np.random.RandomState(seed)
    numbers = rng.randint(1, most_sentences, count)
    return [rng.randint(1, most_tokens, number).tolist() for number in numbers]
