"""The tokens that frame what a text-to-text model reads and writes.

An input ends with the end token, as T5's do, and so does an answer; what a decoder reads begins
with its start token.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megatron.data.loading.t5_batch import Marks, decoder_start
from megatron.data.samples.fim import PieceVocabulary, token_named
from megatron.errors import ConfigError


class MarkedVocabulary(PieceVocabulary, Marks, Protocol):
    """The interface of a tokenizer for marks."""

    @property
    def sep(self) -> int | None:
        """The id that ends a segment."""


class DecoderMarks(NamedTuple):
    """The first token of a decoder, the last one of a text, and what fills up a row."""

    start: int
    end: int
    pad: int

    @classmethod
    def of(cls, tokenizer: MarkedVocabulary) -> "DecoderMarks":
        """Return those of a tokenizer, whose end is its end of document, [EOS] or sep.

        Raises:
            ConfigError: it has none of them, or nothing to begin with.
        """
        end = tokenizer.eod
        if end is None:
            end = token_named(tokenizer, "[EOS]")
        if end is None:
            end = tokenizer.sep
        if end is None:
            raise ConfigError(
                "the tokenizer lacks a token that ends a text",
                found="no end of document, no [EOS] and no sep",
                fix="use a tokenizer with one of them, such as --tokenizer-type HFTokenizer of a "
                "T5",
            )
        start = decoder_start(tokenizer)
        # Padding is marked as such: any id of the model is valid.
        return cls(start, end, start if tokenizer.pad is None else tokenizer.pad)

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens with the end token behind them, once."""
        listed = [*tokens]
        return listed if listed and listed[-1] == self.end else [*listed, self.end]
