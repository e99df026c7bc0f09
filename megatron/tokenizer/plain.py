"""Two tokenizers that need no file: numbers as they are, and bytes as they are.

NullTokenizer reads text that already consists of ids ("17 4 99"), for tests and for data made
elsewhere. ByteTokenizer has one id for each byte of UTF-8, so no text is unknown to it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.protocol import END_OF_TEXT, SpecialIds, Tokenizer, checked_ids

_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class NullTokenizer(SpecialIds):
    """Ids 0 to N-1 as decimal numbers with spaces between; N itself ends a document."""

    name: str
    vocab_size: int

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit()) or int(word) >= self.vocab_size - 1:
                raise DataError(
                    "NullTokenizer reads ids with space between them, and this is not one",
                    found=f"{word!r} with --vocab-size {self.vocab_size - 1}",
                    fix=f"write numbers from 0 to {self.vocab_size - 2}, or use another "
                    "--tokenizer-type for text",
                )
            ids.append(int(word))
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, checked_ids(ids, self.vocab_size)))

    def piece(self, token_id: int) -> str:
        return self.detokenize([token_id])


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer(SpecialIds):
    """The bytes of UTF-8, and 256 for the end of a document."""

    name: str
    vocab_size: int = _BYTES + 1

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        # A model may stop inside a character: such bytes show as U+FFFD.
        spelled = b"".join(
            END_OF_TEXT.encode() if token == _BYTES else bytes([token])
            for token in checked_ids(ids, self.vocab_size)
        )
        return spelled.decode(errors="replace")

    def piece(self, token_id: int) -> str:
        token = checked_ids([token_id], self.vocab_size)[0]
        return END_OF_TEXT if token == _BYTES else f"<0x{token:02X}>"


def build(name: str, *, vocab_size: int = _BYTES) -> Tokenizer:
    """Return one of the two tokenizers; `vocab_size` is NullTokenizer's N."""
    if name == "ByteTokenizer":
        return ByteTokenizer(name=name, eod=_BYTES, eod_note="256, the id after the bytes")
    if vocab_size < 1:
        raise ConfigError(
            "NullTokenizer needs at least one id",
            found=f"--vocab-size {vocab_size}",
            fix="use --vocab-size 1 or more",
        )
    return NullTokenizer(
        name=name, vocab_size=vocab_size + 1, eod=vocab_size, eod_note="the id after the last"
    )
