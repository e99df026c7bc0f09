"""Selects the words of a text to mask, with Megatron's draws, and makes masks of padding.

What a reader would get wrong: the order and the number of draws decide every later one, so what
looks like waste (a draw whose result is thrown away) is kept. The budget is a float: a short text
of a small budget has nothing masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.errors import ConfigError, DataError

_GEOMETRIC = 0.2  # of SpanBERT (Joshi et al. 2020): the chance that a span ends after each word

Int64s = npt.NDArray[np.int64]


class WordPieces(Protocol):
    """The interface of a tokenizer for masking."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    @property
    def cls(self) -> int | None:
        """The id that opens a text."""

    @property
    def sep(self) -> int | None:
        """The id that ends a segment."""

    @property
    def mask(self) -> int | None:
        """The id of the mask."""

    @property
    def pad(self) -> int | None:
        """The id that fills up a row."""

    def piece(self, token_id: int) -> str:
        """Return one id as the vocabulary spells it; ## begins a piece that continues a word."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskingVocabulary:
    """The part of a vocabulary that masking uses; small, and sent to data workers."""

    continues: npt.NDArray[np.bool_]  # [vocab_size], whether the piece continues a word
    cls: int
    sep: int
    mask: int
    pad: int

    @classmethod
    def of(cls, tokenizer: WordPieces) -> "MaskingVocabulary":
        """Return that of `tokenizer`; raises ConfigError if it lacks a special token of BERT."""
        ids = {name: getattr(tokenizer, name) for name in ("cls", "sep", "mask", "pad")}
        missing = [f"[{name.upper()}]" for name, token in ids.items() if token is None]
        if missing:
            raise ConfigError(
                "the tokenizer lacks tokens that masking needs",
                found=f"no {', '.join(missing)}",
                fix="use --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase",
            )
        pieces = (tokenizer.piece(token) for token in range(tokenizer.vocab_size))
        return cls(continues=np.array([piece.startswith("##") for piece in pieces]), **ids)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self.continues)

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where masking is."""
        digest = xxhash.xxh3_128(self.continues.tobytes())
        digest.update(repr((self.cls, self.sep, self.mask, self.pad)).encode())
        return digest.hexdigest()


class MaskingStyle(Enum):
    """How long a masked span is, in words, and what is put in its place."""

    BERT = "up to 3 words, weights 1/n; 80% the mask, 10% left, 10% any token"
    T5 = "geometric, up to 10 words; always the mask"

    @property
    def longest_span(self) -> int:
        """Words of the longest span."""
        return 3 if self is MaskingStyle.BERT else 10


class MaskedTokens(NamedTuple):
    """A text of which some positions are to be predicted; `text` has the masks in it."""

    text: list[int]
    spans: list[list[int]]  # ordered by their first position, which none shares with another

    @property
    def positions(self) -> list[int]:
        """Every masked position in rising order."""
        return sorted(position for span in self.spans for position in span)


def mask_words(
    tokens: Sequence[int],
    vocabulary: MaskingVocabulary,
    *,
    rng: np.random.RandomState,
    probability: float,
    target_length: int,
    style: MaskingStyle,
) -> MaskedTokens:
    """Mask whole words of `tokens`, and runs of them, up to a share of `probability`.

    The budget is min(probability * target_length, max(1, round(probability * len(tokens)))).
    """
    text = list(tokens)
    words = _whole_words(tokens, vocabulary)
    if probability == 0:
        return MaskedTokens(text, [])
    budget = min(probability * target_length, max(1, round(probability * len(tokens))))
    covered: set[int] = set()
    spans = []
    order = np.arange(len(words))
    rng.shuffle(order)
    for first in order.tolist():
        if len(covered) >= budget:
            break
        num_words = _draw_span_length(rng, style)  # drawn for covered words too
        span = _longest_that_fits(words[first : first + num_words], budget - len(covered))
        if not span or not covered.isdisjoint(span):
            continue
        covered.update(span)
        spans.append(span)
        for position in span:
            text[position] = _replacement(tokens[position], vocabulary, rng, style)
    rng.shuffle(order)  # unused, but keeps later draws equal to Megatron's
    return MaskedTokens(text, sorted(spans))


def attention_mask(num_rows: int, rows: int, num_columns: int, columns: int) -> Int64s:
    """Return int64 [rows, columns], 1 where both positions are within texts of these lengths.

    Megatron tests instead whether an id is 1 or more, which also hides text of id 0.
    """
    mask = np.zeros((rows, columns), np.int64)
    mask[:num_rows, :num_columns] = 1
    return mask


def padded(ids: Sequence[int], length: int, filler: int) -> Int64s:
    """Return `ids` padded with `filler`, int64 [length]; ValueError if too long."""
    if len(ids) > length:
        raise ValueError(f"{len(ids)} ids do not fit into {length}")
    row = np.full(length, filler, np.int64)
    row[: len(ids)] = ids
    return row


def _whole_words(tokens: Sequence[int], vocabulary: MaskingVocabulary) -> list[list[int]]:
    """Return the positions of each word; a continuing piece belongs to the last word before it."""
    ids = np.asarray(tokens, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary.size):
        raise DataError(
            "a corpus holds token ids outside of the vocabulary",
            found=f"ids {ids.min()}..{ids.max()}; the vocabulary has {vocabulary.size}",
            fix="give the --vocab-file that the corpus was preprocessed with",
        )
    words: list[list[int]] = []
    for position, (token, continues) in enumerate(zip(tokens, vocabulary.continues[ids].tolist())):
        if token in (vocabulary.cls, vocabulary.sep):
            continue
        if continues and words:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def _cumulative_span_lengths() -> npt.NDArray[np.float64]:
    """Return the cumulative weights of `RandomState.choice`, for weights 1/1, 1/2, 1/3."""
    weights = 1.0 / np.arange(1, MaskingStyle.BERT.longest_span + 1)
    weights /= weights.sum()
    cumulative: npt.NDArray[np.float64] = (weights / weights.sum()).cumsum()
    cumulative /= cumulative[-1]
    return cumulative


_CUMULATIVE = _cumulative_span_lengths()


def _draw_span_length(rng: np.random.RandomState, style: MaskingStyle) -> int:
    if style is MaskingStyle.T5:
        return min(int(rng.geometric(_GEOMETRIC)), style.longest_span)
    return int(_CUMULATIVE.searchsorted(rng.random(), side="right")) + 1


def _longest_that_fits(words: list[list[int]], room: float) -> list[int]:
    """Return the positions of as many of `words`, from the first on, as fit; it may be none."""
    span = [position for word in words for position in word]
    while words and len(span) > room:
        words = words[:-1]
        span = [position for word in words for position in word]
    return span


def _replacement(
    token: int, vocabulary: MaskingVocabulary, rng: np.random.RandomState, style: MaskingStyle
) -> int:
    if style is MaskingStyle.T5 or rng.random() < 0.8:
        return vocabulary.mask
    if rng.random() < 0.5:
        return token
    return int(rng.randint(0, vocabulary.size))
