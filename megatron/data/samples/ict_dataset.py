"""The inverse cloze task: a sentence, and the block of text that it was taken from.

Blocks and their order are Megatron's; the query sentence is drawn per sample, where Megatron's draw
depends on everything read before by the same process. What a reader would get wrong: a row of the
block map counts documents from the start of the split, and titles are those of the whole corpus;
document numbers in samples are those of the corpus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache
from megatron.data.orders.sentence_maps import SentenceRule
from megatron.data.samples.masking import MaskingVocabulary, padded
from megatron.data.samples.sentence_samples import (
    SentenceDataset,
    SentenceSamples,
    Tokens,
)
from megatron.errors import DataError

_SPECIAL_TOKENS = 3  # CLS, SEP after the title, SEP


@dataclass(frozen=True, slots=True, kw_only=True)
class ICTRecipe:
    """How blocks are cut, and how often the query sentence stays in its block.

    In a block of one sentence (`one_sentence_documents`) it always stays: nothing would be left.
    """

    vocabulary: MaskingVocabulary
    seq_length: int
    seed: int
    query_in_block_prob: float = 0.1
    one_sentence_documents: bool = False

    def __post_init__(self) -> None:
        if self.seq_length < _SPECIAL_TOKENS + 2 or not 0 <= self.query_in_block_prob <= 1:
            raise ValueError(
                f"seq_length {self.seq_length} (5 or more), query_in_block_prob "
                f"{self.query_in_block_prob}"
            )

    def rule(self, num_samples: int) -> SentenceRule:
        """Return how documents are cut into blocks."""
        return SentenceRule(
            num_samples=num_samples,
            max_tokens=self.seq_length - _SPECIAL_TOKENS,
            min_sentences=1 if self.one_sentence_documents else 2,
            seed=self.seed,
        )


class ICTDataset(SentenceDataset):
    """Queries and the blocks of text that they come from, for the inverse cloze task.

    Sample i has `query_tokens` and `context_tokens` [s], their `_pad_mask` [s], and `block_data`
    [4]: first sentence, end, document of the corpus, number of the block.
    `titles` is a corpus of one item per document, or None. Raises DataError for a corpus without
    a block, other titles than documents, and a title that leaves no room.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        documents: DocumentSlice,
        *,
        titles: MMapIndexedDataset | None,
        recipe: ICTRecipe,
        num_samples: int,
        cache: IndexCache,
    ) -> None:
        rule = recipe.rule(num_samples)
        sizes = title_sizes(indexed, titles, documents, rule.max_tokens)
        super().__init__(
            SentenceSamples(indexed, documents, rule=rule, cache=cache, title_sizes=sizes)
        )
        self.recipe, self.titles = recipe, titles
        self._first_document = documents.start

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        start, stop, document, number = self.samples.row(index)
        document += self._first_document
        block = self.samples.sentences(start, stop)
        rng = self.samples.generator(index)
        position = int(rng.randint(0, len(block)))
        query = block[position]
        if rng.random() >= self.recipe.query_in_block_prob and len(block) > 1:
            del block[position]
        title = None if self.titles is None else self.titles.get(document)
        return {
            **self._side("query", query, None),
            **self._side("context", np.concatenate(block), title),
            "block_data": np.array([start, stop, document, number], np.int64),
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes, order and queries are."""
        return self.samples.fingerprint(
            kind="ict",
            seq_length=self.recipe.seq_length,
            query_in_block_prob=self.recipe.query_in_block_prob,
            titles="none" if self.titles is None else self.titles.fingerprint(),
            vocabulary=self.recipe.vocabulary.fingerprint(),
        )

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus or the titles were touched since they were opened."""
        super().check_unchanged()
        if self.titles is not None:
            self.titles.check_unchanged()

    def _side(self, key: str, text: Tokens, title: Tokens | None) -> Sample:
        """Return CLS, the title and SEP if there is one, as much of the text as fits, SEP."""
        vocabulary, length = self.recipe.vocabulary, self.recipe.seq_length
        opening = None if title is None else title.tolist()
        tokens, _ = row_of_text(vocabulary, text.tolist(), opening, length)
        return {
            f"{key}_tokens": padded(tokens, length, vocabulary.pad),
            f"{key}_pad_mask": padded([1] * len(tokens), length, 0),
        }


def row_of_text(
    vocabulary: MaskingVocabulary,
    text: Sequence[int],
    title: Sequence[int] | None,
    length: int,
) -> tuple[list[int], bool]:
    """Return CLS, the title and SEP if there is one, the text, SEP; and whether it was cut.

    Args:
        length: the most tokens of the row, whose end is cut off before the last SEP.
    """
    opening = [] if title is None else [*title, vocabulary.sep]
    whole = [vocabulary.cls, *opening, *text]
    return [*whole[: length - 1], vocabulary.sep], len(whole) > length - 1


def title_sizes(
    indexed: MMapIndexedDataset,
    titles: MMapIndexedDataset | None,
    documents: DocumentSlice,
    max_tokens: int,
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return tokens of the title of each document of the split; zeros without titles."""
    num_documents = len(indexed.doc_idx) - 1
    if titles is None:
        return np.zeros(documents.stop - documents.start, np.int32)
    if len(titles) != num_documents:
        raise DataError(
            "the titles are not those of the corpus",
            found=f"{len(titles)} titles in {titles.prefix}, {num_documents} documents in "
            f"{indexed.prefix}",
            fix="preprocess both keys of the same file in one run",
        )
    sizes = np.array(titles.sizes[documents.start : documents.stop], np.int32)
    if len(sizes) and int(sizes.max()) >= max_tokens:
        longest = int(sizes.argmax())
        raise DataError(
            f"a title of {titles.prefix} leaves no room for text",
            found=f"{sizes[longest]} tokens of document {documents.start + longest}; room for "
            f"{max_tokens} tokens of title and text",
            fix="use a longer --seq-length, or shorten the titles",
        )
    return sizes
