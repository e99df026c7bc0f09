"""BERT's samples: two segments in their order or swapped, with masked words.

Each sample equals Megatron's for the same seed (docs/data.md). What a reader would get wrong:
`is_random` means swapped, the segments always follow each other in one document; and a sample has
its own target length, to which it is cut, so most rows end in padding.
"""

from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache
from megatron.data.orders.sentence_maps import SentenceRule
from megatron.data.samples.masking import MaskingStyle, MaskingVocabulary, mask_words, padded
from megatron.data.samples.sentence_samples import (
    SentenceDataset,
    SentenceSamples,
    Tokens,
    joined,
)

_SPECIAL_TOKENS = 3  # CLS, SEP, SEP


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTRecipe:
    """How samples are cut and masked; `binary_head` is the one that predicts the order."""

    vocabulary: MaskingVocabulary
    seq_length: int
    seed: int
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    binary_head: bool = True

    def __post_init__(self) -> None:
        if self.seq_length < _SPECIAL_TOKENS + 2 or not 0 <= self.masked_lm_prob <= 1:
            raise ValueError(
                f"seq_length {self.seq_length} (5 or more), masked_lm_prob {self.masked_lm_prob}"
            )

    def rule(self, num_samples: int) -> SentenceRule:
        """Return how documents are cut into samples."""
        return SentenceRule(
            num_samples=num_samples,
            max_tokens=self.seq_length - _SPECIAL_TOKENS,
            min_sentences=2 if self.binary_head else 1,
            seed=self.seed,
            short_seq_prob=self.short_seq_prob,
        )


class BERTDataset(SentenceDataset):
    """Pairs of segments with masked words, for BERT.

    Sample i is a row [seq_length] each of `text`, `types`, `labels`, `loss_mask` and
    `padding_mask`, and the numbers `is_random` and `truncated`; all int64. `labels` are -1 where
    nothing is to be predicted. Raises DataError for a corpus without a sample.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        documents: DocumentSlice,
        *,
        recipe: BERTRecipe,
        num_samples: int,
        cache: IndexCache,
    ) -> None:
        rule = recipe.rule(num_samples)
        super().__init__(SentenceSamples(indexed, documents, rule=rule, cache=cache))
        self.recipe = recipe

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        start, stop, target = self.samples.row(index)
        sentences = self.samples.sentences(start, stop)
        rng = self.samples.generator(index)
        if self.recipe.binary_head:
            first, second, swapped = _two_segments(sentences, rng)
        else:
            first, second, swapped = joined(sentences), [], False
        before = len(first) + len(second)
        first, second = _truncated(first, second, target, rng)
        vocabulary, length = self.recipe.vocabulary, self.recipe.seq_length
        tokens = [vocabulary.cls, *first, vocabulary.sep]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, vocabulary.sep]
            types += [1] * (len(second) + 1)
        if len(tokens) > length:
            raise self.samples.refuse_length(index, len(tokens), length)
        masked = mask_words(
            tokens,
            vocabulary,
            rng=rng,
            probability=self.recipe.masked_lm_prob,
            target_length=target,
            style=MaskingStyle.BERT,
        )
        labels, loss_mask = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        positions = masked.positions
        labels[positions] = [tokens[position] for position in positions]
        loss_mask[positions] = 1
        return {
            "text": padded(masked.text, length, vocabulary.pad),
            "types": padded(types, length, 0),
            "labels": labels,
            "is_random": np.array(swapped, np.int64),
            "loss_mask": loss_mask,
            "padding_mask": padded([1] * len(tokens), length, 0),
            "truncated": np.array(before > target, np.int64),
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes, order and masking are."""
        return self.samples.fingerprint(
            kind="bert",
            seq_length=self.recipe.seq_length,
            binary_head=self.recipe.binary_head,
            masked_lm_prob=self.recipe.masked_lm_prob,
            vocabulary=self.recipe.vocabulary.fingerprint(),
        )


def _two_segments(
    sentences: list[Tokens], rng: np.random.RandomState
) -> tuple[list[int], list[int], bool]:
    """Return both segments in the order in which they are shown, and whether they are swapped."""
    border = int(rng.randint(1, len(sentences))) if len(sentences) >= 3 else 1
    first, second = joined(sentences[:border]), joined(sentences[border:])
    if rng.random() < 0.5:
        return second, first, True
    return first, second, False


def _truncated(
    first: list[int], second: list[int], target: int, rng: np.random.RandomState
) -> tuple[list[int], list[int]]:
    """Remove tokens one by one from a random end of the longer segment (the second if equal)."""
    segments = (first, second)
    starts, stops = [0, 0], [len(first), len(second)]
    excess = max(0, len(first) + len(second) - target)
    for at_front in (rng.random(excess) < 0.5).tolist():
        longer = 0 if stops[0] - starts[0] > stops[1] - starts[1] else 1
        if at_front:
            starts[longer] += 1
        else:
            stops[longer] -= 1
    cut = [segment[starts[i] : stops[i]] for i, segment in enumerate(segments)]
    return cut[0], cut[1]
