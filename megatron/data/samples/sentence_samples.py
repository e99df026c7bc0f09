"""The samples of one split of a corpus of sentences.

BERT, T5 and ICT datasets use `SentenceSamples`: a cached map, the sentences of a row, the generator
of a sample. What a reader would get wrong: here a split is made of *documents*, ranges of
`doc_idx`, where a GPT split is made of items. The datasets define the items.
"""

import dataclasses
import operator
from collections.abc import Sequence
from functools import partial
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import log
from megatron.data.corpus.metadata import ItemLevel
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import Arrays, IndexCache, description_digest
from megatron.data.orders.sentence_maps import (
    Int64s,
    SentenceRule,
    Sizes,
    build_block_map,
    build_sentence_map,
)
from megatron.errors import DataError

_MAP_VERSION = 1  # of the recipe in sentence_maps.py; part of every cache key

Tokens = npt.NDArray[np.integer]


class SentenceSamples:
    """Rows of a sentence map, or of a block map if `titles` are given, and their sentences.

    Raises DataError for a split without documents, a corpus that is not one of sentences, and one
    that cannot give a sample.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        documents: DocumentSlice,
        *,
        rule: SentenceRule,
        cache: IndexCache,
        title_sizes: Sizes | None = None,
    ) -> None:
        self.indexed, self.name, self.seed = indexed, documents.name, rule.seed
        self._check_documents(documents)
        _require_sentences(indexed)
        self._description: dict[str, str | int | float] = {
            "order": f"{'sentences' if title_sizes is None else 'blocks'}-{_MAP_VERSION}",
            "corpus": indexed.fingerprint(),
            "first_document": documents.start,
            "stop_document": documents.stop,
            "title_sizes": (
                "none" if title_sizes is None else xxhash.xxh3_128_hexdigest(title_sizes.tobytes())
            ),
            **dataclasses.asdict(rule),
        }
        borders = indexed.doc_idx[documents.start : documents.stop + 1]
        build = partial(_build, borders, indexed.sizes, title_sizes, rule)
        self._index = cache.load_or_build(documents.name, self._description, build=build)
        log.debug(f"{self.name}: {len(self)} samples of sentences from {indexed.prefix}")

    def __len__(self) -> int:
        return len(self._index["rows"])

    def row(self, index: SupportsIndex) -> list[int]:
        """Return row `index` of the map; IndexError outside 0..len - 1."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        row: list[int] = self._index["rows"][i].tolist()
        return row

    def sentences(self, start: int, stop: int) -> list[Tokens]:
        """Return the tokens of each of the sentences start..stop - 1."""
        return [self.indexed.get(sentence) for sentence in range(start, stop)]

    def generator(self, index: SupportsIndex) -> np.random.RandomState:
        """Return the generator of sample `index`, equal in every process and at any time."""
        return np.random.RandomState((self.seed + operator.index(index)) % 2**32)

    def fingerprint(self, **recipe: str | int | float) -> str:
        """Return 32 hex digits of the map and of a dataset's description of its items."""
        return description_digest({**self._description, **recipe})

    def refuse_length(self, index: SupportsIndex, found: int, most: int) -> DataError:
        """Return the error for sample `index`, which does not fit its row."""
        return DataError(
            f"sample {operator.index(index)} of {self.name} is longer than its row",
            found=f"{found} tokens; room for {most}",
            fix="remove the index cache and start again; report this if it comes back",
        )

    @property
    def index_files(self) -> dict[str, str]:
        """The cache file behind the rows."""
        return {key: str(path) for key, path in self._index.files.items()}

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus was touched since it was opened."""
        self.indexed.check_unchanged()

    def _check_documents(self, documents: DocumentSlice) -> None:
        num_documents = len(self.indexed.doc_idx) - 1
        if not 0 <= documents.start <= documents.stop <= num_documents:
            raise ValueError(f"{documents} of a corpus of {num_documents} documents")
        if documents.start == documents.stop:
            raise DataError(
                f"the {self.name} split of {self.indexed.prefix} has no documents",
                found=f"0 of {num_documents} documents",
                fix="give it a larger part with --split, or a corpus of its own",
            )


class SentenceDataset:
    """The common part of datasets of sentences; subclasses define the items."""

    def __init__(self, samples: SentenceSamples) -> None:
        self.samples, self.name = samples, samples.name

    def __len__(self) -> int:
        return len(self.samples)

    def check_unchanged(self) -> None:
        """Raise DataError if a file was touched since it was opened."""
        self.samples.check_unchanged()


def joined(sentences: Sequence[Tokens]) -> list[int]:
    """Return the tokens of all sentences, end to end."""
    return [token for sentence in sentences for token in sentence.tolist()]


def _build(borders: Int64s, sizes: Sizes, title_sizes: Sizes | None, rule: SentenceRule) -> Arrays:
    if title_sizes is None:
        return {"rows": build_sentence_map(borders, sizes, rule)}
    return {"rows": build_block_map(borders, sizes, title_sizes, rule)}


def _require_sentences(indexed: MMapIndexedDataset) -> None:
    if indexed.metadata is not None and indexed.metadata.level != ItemLevel.SENTENCE:
        raise DataError(
            f"the corpus {indexed.prefix} is not split into sentences",
            found=f'level "{indexed.metadata.level}" in its sidecar',
            fix="preprocess it with --split-sentences",
        )
    if indexed.metadata is None and len(indexed.doc_idx) - 1 == len(indexed):
        log.warning_once(
            f"documents {indexed.prefix}",
            f"{indexed.prefix} has one item in each of its {len(indexed)} documents: if it was "
            "not split into sentences, the end of every long document is never read",
        )
