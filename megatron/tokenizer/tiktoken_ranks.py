"""Megatron-LM's TikTokenizer: a list of byte sequences by rank, as Nemotron's vocabularies have.

Special tokens come first: seven with names, and as many without as --tiktoken-num-special-tokens
says. What follows is byte-pair encoding by tiktoken, of the pieces that a pattern splits text into.
What a reader would get wrong: special tokens are never found in text.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError, MachineError
from megatron.json_values import parse_json
from megatron.tokenizer.protocol import SpecialIds, Tokenizer, checked_ids, existing_file

_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_NAMED = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_MOST = 2**17  # tokens, where no size is given
_BYTES = 256
_KEYS = {"rank", "token_bytes", "token_str"}


@dataclass(frozen=True, kw_only=True)
class RankTokenizer(SpecialIds):
    """Special tokens, then byte sequences by rank."""

    name: str
    encoding: Any = field(repr=False)  # tiktoken.Encoding, which may not be installed
    special: tuple[str, ...] = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """Special tokens and byte sequences."""
        return len(self.special) + int(self.encoding.n_vocab)

    def tokenize(self, text: str) -> list[int]:
        return [len(self.special) + rank for rank in self.encoding.encode_ordinary(text)]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, checked_ids(ids, self.vocab_size))).decode(
            errors="replace"
        )

    def piece(self, token_id: int) -> str:
        (token,) = checked_ids([token_id], self.vocab_size)
        return self.token_bytes(token).decode(errors="backslashreplace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        if token < len(self.special):
            return self.special[token].encode()
        found: bytes = self.encoding.decode_single_token_bytes(token - len(self.special))
        return found


def build(
    name: str,
    *,
    tokenizer_model: str,
    tiktoken_pattern: str,
    tiktoken_num_special_tokens: int,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Read the JSON file of ranks; of a larger one than `vocab_size` only the first are used."""
    if tiktoken_pattern not in _PATTERNS:
        raise ConfigError(
            f"{name} splits text by a pattern of another name",
            found=f"--tiktoken-pattern {tiktoken_pattern}",
            fix=f"use one of {', '.join(_PATTERNS)}",
        )
    count = tiktoken_num_special_tokens
    if count < len(_NAMED):
        raise ConfigError(
            f"{name} has more special tokens with names",
            found=f"--tiktoken-num-special-tokens {count}",
            fix=f"use {len(_NAMED)} or more, such as 1000",
        )
    path = existing_file(tokenizer_model, "--tokenizer-model")
    ranks = _read(path)
    wanted = min(_MOST, count + len(ranks)) if vocab_size is None else vocab_size
    if not count + _BYTES <= wanted <= count + len(ranks):
        raise ConfigError(
            f"{name} has no such number of tokens",
            found=f"--vocab-size {wanted}, {count} special tokens, {len(ranks)} in {path}",
            fix=f"use {count + _BYTES} to {count + len(ranks)}, or leave it out",
        )
    special = (*_NAMED, *(f"<SPECIAL_{number}>" for number in range(len(_NAMED), count)))
    return RankTokenizer(
        name=name,
        encoding=_encoding(path, ranks[: wanted - count], _PATTERNS[tiktoken_pattern]),
        special=special,
        eod=special.index("</s>"),
        eod_note="</s>, the third special token",
        pad=special.index("<pad>"),
        bos=special.index("<s>"),
        unk=special.index("<unk>"),
        cls=special.index("<cls>"),
        sep=special.index("<sep>"),
        mask=special.index("<mask>"),
    )


def _read(path: Path) -> list[bytes]:
    """Return the byte sequences of the file, each at its rank."""
    try:
        entries = parse_json(path.read_bytes())
        if not isinstance(entries, list):
            raise ValueError("it is not a list")
        sequences = [_sequence(rank, entry) for rank, entry in enumerate(entries)]
        if sequences[:_BYTES] != [bytes([byte]) for byte in range(_BYTES)]:
            raise ValueError("its first 256 entries are not the bytes in order")
        if len(set(sequences)) < len(sequences):
            raise ValueError("a sequence of bytes stands in it twice")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            "the vocabulary of TikTokenizer cannot be read",
            found=f"--tokenizer-model {path}: {error}",
            fix="give the JSON list of rank, token_bytes and token_str that Megatron-LM reads",
        ) from error
    return sequences


def _sequence(rank: int, entry: object) -> bytes:
    if not isinstance(entry, dict) or set(entry) != _KEYS or entry["rank"] != rank:
        raise ValueError(f"entry {rank} is not rank, token_bytes and token_str of rank {rank}")
    try:
        return base64.b64decode(str(entry["token_bytes"]), validate=True)
    except binascii.Error as error:
        raise ValueError(f"token_bytes of entry {rank}: {error}") from error


def _encoding(path: Path, sequences: Sequence[bytes], pattern: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise MachineError(
            "TikTokenizer needs a package that is not installed",
            found="no tiktoken",
            fix="pip install tiktoken",
        ) from error
    return tiktoken.Encoding(
        path.name,
        pat_str=pattern,
        mergeable_ranks={sequence: rank for rank, sequence in enumerate(sequences)},
        special_tokens={},
    )
