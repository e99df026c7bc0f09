"""T5's samples: a text with spans replaced by sentinels, and the spans as the decoder's targets.

Each sample equals Megatron's for the same seed (docs/data.md), for seeds and numbers of samples
whose sum is below 2**32; beyond that Megatron fails. What a reader would get wrong: the decoder's
row has a length of its own, and a text of many short spans may not fit into it.
"""

from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

import numpy as np

from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache
from megatron.data.orders.sentence_maps import SentenceRule
from megatron.data.samples.masking import (
    MaskedTokens,
    MaskingStyle,
    MaskingVocabulary,
    attention_mask,
    mask_words,
    padded,
)
from megatron.data.samples.sentence_samples import (
    SentenceDataset,
    SentenceSamples,
    joined,
)
from megatron.errors import DataError

_SPECIAL_TOKENS = 2  # that Megatron reserves, and does not use


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Recipe:
    """How samples are cut and masked; `sentinels` stand for the spans, in this order."""

    vocabulary: MaskingVocabulary
    bos: int
    eos: int
    sentinels: tuple[int, ...]
    seq_length: int
    decoder_seq_length: int
    seed: int
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1

    def __post_init__(self) -> None:
        least = min(self.seq_length - _SPECIAL_TOKENS, self.decoder_seq_length)
        if least < 2 or not 0 <= self.masked_lm_prob <= 1:
            raise ValueError(
                f"seq_length {self.seq_length} (4 or more), decoder_seq_length "
                f"{self.decoder_seq_length} (2 or more), masked_lm_prob {self.masked_lm_prob}"
            )

    def rule(self, num_samples: int) -> SentenceRule:
        """Return how documents are cut into samples."""
        return SentenceRule(
            num_samples=num_samples,
            max_tokens=self.seq_length - _SPECIAL_TOKENS,
            min_sentences=1,
            seed=self.seed,
            short_seq_prob=self.short_seq_prob,
        )


class T5Dataset(SentenceDataset):
    """Texts with spans replaced by sentinels, and the spans as targets, for T5.

    Sample i has `text_enc` [s], `text_dec`, `labels` and `loss_mask` [d], the number
    `truncated`, `enc_mask` [s, s], `dec_mask` [d, d] (causal) and `enc_dec_mask` [d, s]; all int64.
    s is the sequence length and d that of the decoder; `labels` are -1 in padding. Raises
    DataError for a corpus without a sample.

    Args:
        square_masks: else there is `padding_mask` [s] instead of the three masks.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        documents: DocumentSlice,
        *,
        recipe: T5Recipe,
        num_samples: int,
        cache: IndexCache,
        square_masks: bool = True,
    ) -> None:
        rule = recipe.rule(num_samples)
        super().__init__(SentenceSamples(indexed, documents, rule=rule, cache=cache))
        self.recipe, self._square_masks = recipe, square_masks

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        start, stop, target = self.samples.row(index)
        text = joined(self.samples.sentences(start, stop))
        tokens = text[:target]
        masked = mask_words(
            tokens,
            self.recipe.vocabulary,
            rng=self.samples.generator(index),
            probability=self.recipe.masked_lm_prob,
            target_length=target,
            style=MaskingStyle.T5,
        )
        self._check_sentinels(index, len(masked.spans))
        sides = _two_sides(tokens, masked, self.recipe)
        rows, columns = self.recipe.decoder_seq_length, self.recipe.seq_length
        encoder, decoder = len(sides.encoder), len(sides.decoder_in)
        if encoder > columns:
            raise self.samples.refuse_length(index, encoder, columns)
        if decoder > rows:
            raise DataError(
                f"the spans of sample {index} of {self.name} do not fit the decoder",
                found=f"{decoder} tokens in {len(masked.spans)} spans; room for {rows}",
                fix="use a longer --decoder-seq-length, or mask a smaller share",
            )
        pad = self.recipe.vocabulary.pad
        masks = {"padding_mask": padded([1] * encoder, columns, 0)}
        if self._square_masks:
            masks = {
                "enc_mask": attention_mask(encoder, columns, encoder, columns),
                "dec_mask": np.tril(attention_mask(decoder, rows, decoder, rows)),
                "enc_dec_mask": attention_mask(decoder, rows, encoder, columns),
            }
        return {
            "text_enc": padded(sides.encoder, columns, pad),
            "text_dec": padded(sides.decoder_in, rows, pad),
            "labels": padded(sides.labels, rows, -1),
            "loss_mask": padded([1] * decoder, rows, 0),
            "truncated": np.array(len(text) > target, np.int64),
            **masks,
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes, order and masking are."""
        recipe = self.recipe
        return self.samples.fingerprint(
            kind="t5",
            seq_length=recipe.seq_length,
            decoder_seq_length=recipe.decoder_seq_length,
            masked_lm_prob=recipe.masked_lm_prob,
            vocabulary=recipe.vocabulary.fingerprint(),
            special=repr((recipe.bos, recipe.eos, recipe.sentinels)),
        )

    def _check_sentinels(self, index: SupportsIndex, wanted: int) -> None:
        if wanted > len(self.recipe.sentinels):
            raise DataError(
                f"sample {index} of {self.name} has more spans than there are sentinels",
                found=f"{wanted} spans, {len(self.recipe.sentinels)} sentinels",
                fix="add sentinels with --vocab-extra-ids 100, or mask a smaller share",
            )


class _Sides(NamedTuple):
    encoder: list[int]
    decoder_in: list[int]
    labels: list[int]


def _two_sides(tokens: list[int], masked: MaskedTokens, recipe: T5Recipe) -> _Sides:
    """Return the text with one sentinel per span, and each sentinel followed by its span."""
    encoder: list[int] = []
    spans: list[int] = []
    done = 0
    for sentinel, span in zip(recipe.sentinels, masked.spans):
        encoder += [*masked.text[done : span[0]], sentinel]
        spans += [sentinel, *(tokens[position] for position in span)]
        done = span[-1] + 1
    return _Sides(encoder + masked.text[done:], [recipe.bos, *spans], [*spans, recipe.eos])
