"""The text of tokens that come one by one.

The bytes of a token are known, and a decoder of UTF-8 holds back those of an unfinished character:
no token is decoded twice, and no character is shown as U+FFFD that a later token completes. Where
tokens depend on their neighbours (NullTokenizer, WordPiece), all are decoded again for each.
What a reader would get wrong: SentencePiece drops a space at the start of a document only, so the
first token of a continuation keeps its own.
"""

import codecs
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from megatron.tokenizer.huggingface import LibraryTokenizer, byte_symbols
from megatron.tokenizer.plain import ByteTokenizer
from megatron.tokenizer.protocol import END_OF_TEXT, Tokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tiktoken_ranks import RankTokenizer

_SPACE = "\u2581"  # SentencePiece's character of a space
_REPLACED = "\ufffd"
_MOST_HELD = 3  # bytes of an unfinished character
_CACHED_TOKENS = 1 << 16


class IncrementalText(Protocol):
    """The text of one sequence of tokens, in parts."""

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token; maybe none."""

    def end(self) -> str:
        """Return what was held back, because no token follows."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the tokens of a tokenizer become text.

    Attributes:
        tokenizer: whose tokens they are.
        bytes_of: the bytes of one token, alone; none for a row of the model that is no token.
        is_joined: whether the text is that of the joined bytes.
        first_spaces: of how many tokens at the start of a text the space before is dropped.
        keeps_space: whether the space of a token is not one of those, as it is part of its text.
        restarts_after: whether a token is followed by a text of its own.
    """

    tokenizer: Tokenizer
    bytes_of: Callable[[int], bytes]
    is_joined: bool
    first_spaces: float = 0
    keeps_space: Callable[[int], bool] = lambda token: False
    restarts_after: Callable[[int], bool] = lambda token: False

    def start(self, before: Sequence[int] = ()) -> IncrementalText:
        """Return the text of tokens that follow the tokens `before`; theirs is not repeated."""
        if not self.is_joined:
            return _DecodedAgain(self.tokenizer, before)
        is_start = not any(map(self.bytes_of, before)) or self.restarts_after(before[-1])
        return _JoinedBytes(self, is_start=is_start)

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """Return the text of all `tokens` at once.

        It is that of `Tokenizer.detokenize`, but for bytes that are not UTF-8, of which that of
        some libraries shows more U+FFFD than Unicode recommends.
        """
        text = self.start(before)
        return "".join([*map(text.add, tokens), text.end()])


def text_rules(tokenizer: Tokenizer) -> TextRules:
    """Return how the tokens of `tokenizer` become text."""
    if isinstance(tokenizer, ByteTokenizer):
        return _cached(tokenizer, lambda t: _byte(t) if t < 256 else END_OF_TEXT.encode())
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _rules_of_sentencepiece(tokenizer)
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.core.decoder is not None:
        decoder = json.loads(tokenizer.core.decoder.__getstate__())
        if decoder["type"] == "ByteLevel":
            symbols = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
            return _cached(tokenizer, lambda t: _byte_level(tokenizer.piece(t), symbols))
        if (pieces := _decoder_of_pieces(decoder)) is not None:
            spell = _piece if pieces.has_bytes else _spaced
            return _cached(
                tokenizer, lambda t: spell(tokenizer.piece(t)), first_spaces=pieces.first_spaces
            )
    if isinstance(tokenizer, RankTokenizer):
        return _cached(tokenizer, tokenizer.token_bytes)
    return _cached(tokenizer, lambda t: tokenizer.detokenize([t]).encode(), is_joined=False)


class _JoinedBytes:
    """Text of joined bytes, as `IncrementalText`."""

    def __init__(self, rules: TextRules, *, is_start: bool) -> None:
        self._rules = rules
        self._spaces = rules.first_spaces if is_start else 0  # that may still be dropped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        spelled = self._rules.bytes_of(token)
        if self._spaces and spelled.startswith(b" ") and not self._rules.keeps_space(token):
            spelled = spelled[1:]
            self._spaces -= 1
        if spelled:
            self._spaces = 0
        if self._rules.restarts_after(token):
            self._spaces = self._rules.first_spaces
        return self._decoder.decode(spelled)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _DecodedAgain:
    """Text of a tokenizer whose tokens depend on those before, as `IncrementalText`."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._size = tokenizer, tokenizer.vocab_size
        self._tokens = [token for token in before if token < self._size]
        self._shown = tokenizer.detokenize(self._tokens) if self._tokens else ""

    def add(self, token: int) -> str:
        if token >= self._size:
            return ""
        self._tokens.append(token)
        text = self._tokenizer.detokenize(self._tokens)
        kept = text.rstrip(_REPLACED)
        return self._show(kept if len(text) - len(kept) <= _MOST_HELD else text)

    def end(self) -> str:
        return self._show(self._tokenizer.detokenize(self._tokens)) if self._tokens else ""

    def _show(self, text: str) -> str:
        if not text.startswith(self._shown):  # a later token will tell
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        return new


def _cached(
    tokenizer: Tokenizer,
    bytes_of: Callable[[int], bytes],
    *,
    is_joined: bool = True,
    first_spaces: int = 0,
) -> TextRules:
    @lru_cache(_CACHED_TOKENS)
    def kept(token: int) -> bytes:
        return bytes_of(token) if token < tokenizer.vocab_size else b""

    return TextRules(tokenizer, kept, is_joined, first_spaces)


def _rules_of_sentencepiece(tokenizer: SentencePieceTokenizer) -> TextRules:
    processor, size = tokenizer.processor, tokenizer.processor.get_piece_size()
    # What the model's normalizer was trained to do shows in what decoding drops.
    kept = str(processor.decode([_SPACE, _SPACE, "a"])).count(" ")
    first_spaces = {0: math.inf, 1: 1, 2: 0}[kept]

    @lru_cache(_CACHED_TOKENS)
    def bytes_of(token: int) -> bytes:
        if token >= tokenizer.vocab_size:
            return b""
        if token >= size:
            return str(tokenizer.added[token - size]).encode()
        if processor.is_control(token):
            return b""
        if processor.is_unknown(token):
            return str(processor.decode([token])).encode()
        return _piece(str(processor.id_to_piece(token)))

    return TextRules(
        *(tokenizer, bytes_of, True, first_spaces),
        keeps_space=lambda token: token >= size or processor.is_unknown(token),
        restarts_after=lambda token: token >= size,
    )


class _PieceDecoder(NamedTuple):
    """A decoder of SentencePiece's pieces: spaces dropped at the start, and pieces of one byte."""

    first_spaces: int
    has_bytes: bool


def _decoder_of_pieces(decoder: Mapping[str, Any]) -> _PieceDecoder | None:
    """Return what a decoder of `tokenizers` does, or None if it is of another kind."""
    if decoder["type"] == "Metaspace":
        drops = decoder.get("prepend_scheme", "always") != "never"
        return _PieceDecoder(int(drops), False) if decoder["replacement"] == _SPACE else None
    parts = decoder.get("decoders", ())
    kinds = {part["type"] for part in parts}
    if not {"Replace"} <= kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                pass
            case {"type": "Replace" | "Strip"}:
                return None
    return _PieceDecoder(int("Strip" in kinds), "ByteFallback" in kinds)


def _piece(piece: str) -> bytes:
    """Return the bytes of a piece of SentencePiece, of which one may stand for a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return _byte(int(piece[3:5], 16))
    return _spaced(piece)


def _spaced(piece: str) -> bytes:
    return piece.replace(_SPACE, " ").encode()


def _byte_level(piece: str, symbols: Mapping[str, int]) -> bytes:
    if all(char in symbols for char in piece):
        return bytes(symbols[char] for char in piece)
    return piece.encode()  # an added token


def _byte(value: int) -> bytes:
    return value.to_bytes(1, "big")
