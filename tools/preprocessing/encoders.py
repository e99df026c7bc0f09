"""Faster ways to the ids of a GPT-2 vocabulary, each held against the exact one before its use.

The exact encoder is the tokenizer itself (`tokenizers`). A faster one is used for GPT2BPETokenizer
where its package is installed. What a reader would get wrong: libraries implement different
editions of Unicode, so a text with a letter that some of them may lack always goes to the exact
one.
"""

import functools
import importlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.errors import ConfigError, MegatronError
from megatron.tokenizer.huggingface import LibraryTokenizer, byte_symbols
from megatron.tokenizer.tokenizer import Tokenizer

EXACT = "tokenizers"
_FASTEST_FIRST = ("gigatoken", "tiktoken")
ENCODERS = ("auto", EXACT, *sorted(_FASTEST_FIRST, reverse=True))

# GPT-2's pattern (Radford et al. 2019) with possessive repeats, which match the same.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Blocks in which no letter or digit was added to Unicode since edition 11, and the emoji.
_LONG_SETTLED = re.compile(
    "[^\x00-\u07ff\u2000-\u2bff\u3000-\u30ff\u3200-\u4db5\u4e00-\u9fea\uac00-\ud7a3\uff00-\uffef"
    "\U0001f000-\U0001faff]"
)
# Texts on which pattern, spaces and letters of other scripts show a difference first.
_PROBES = (
    "I'll say they've it's we'd I'm you're 'tis DON'T '",
    "  two\n\n\n lines\t\t tab \r\n end  ",
    " \u00a0\u2003\u3000x\u200b\u2028y\x85z\x0b\x0c\x1c",
    "1234567 3.14 \u0663\u0664 \u00bd \u2167 x2y3",
    "<|endoftext|> <|pad|> !!! ... ---- $#@ _a_b",
    "na\u00efve na\u0308ive \u0434\u043e\u043c \u65e5\u672c\u8a9e\u30ab\u30bf \ud55c\uad6d",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \ufeff\x00\x7f \u0939\u093f\u0928",
    "a" * 3000 + " " * 3000 + "\n" * 3000 + "ab" * 3000,
)


class Encoded(NamedTuple):
    """The ids of several texts, joined, and the length of each text."""

    tokens: npt.NDArray[np.integer]
    sizes: npt.NDArray[np.int64]


Encode = Callable[[Sequence[str]], Encoded]
Build = Callable[[str], Encode]


def choose_encoder(
    wanted: str, tokenizer: Tokenizer, first_texts: Sequence[str], *, build: Build | None = None
) -> str:
    """Return the encoder for `--encoder wanted`, once it encodes `first_texts` exactly.

    `auto` is the fastest that is installed and exact, and logs why others were skipped; one chosen
    by name that cannot be used is an error. `build` makes an encoder by name, for callers that
    cache it.
    """
    build = build or functools.partial(build_encoder, tokenizer=tokenizer)
    if wanted == EXACT:
        return EXACT
    if wanted != "auto":
        _require_exact(wanted, tokenizer, first_texts, build)
        return wanted
    if not _is_gpt2(tokenizer):
        return EXACT
    for name in _FASTEST_FIRST:
        if _module(name) is None:
            continue
        try:
            _require_exact(name, tokenizer, first_texts, build)
        except MegatronError as error:
            log.warning(f"--encoder auto passes over {name}: {error.problem} ({error.found})")
            continue
        return name
    return EXACT


def build_encoder(name: str, tokenizer: Tokenizer) -> Encode:
    """Return the function of the encoder `name`; ConfigError if it cannot use `tokenizer`."""
    exact = functools.partial(_encode_exactly, tokenizer)
    if name == EXACT:
        return exact
    if not isinstance(tokenizer, LibraryTokenizer) or not _is_gpt2(tokenizer):
        raise _unusable(name, f"{tokenizer.name} is not GPT2BPETokenizer")
    if tokenizer.extra_ids:
        raise _unusable(name, "--vocab-extra-ids makes names in the text into ids")
    if tokenizer.absent_bytes:
        raise _unusable(name, f"no piece for byte 0x{tokenizer.absent_bytes[0]:02x}")
    module = _module(name)
    if module is None:
        raise ConfigError(
            f"the package {name} is not installed",
            found=f"--encoder {name}",
            fix=f"pip install {name}, or use --encoder auto",
        )
    build = {"tiktoken": _tiktoken, "gigatoken": _gigatoken}[name]
    return functools.partial(_encode_settled, build(module, tokenizer), exact)


def is_settled(text: str) -> bool:
    """Return whether all Unicode versions put the characters of `text` in the same class."""
    if text.isascii() or not _LONG_SETTLED.search(text):
        return True
    return all(map(_is_settled_character, set(text)))


@functools.cache
def _is_settled_character(character: str) -> bool:
    """Return whether it is a letter, digit or space since Unicode 3.2, or a symbol or mark."""
    now = unicodedata.category(character)
    if now[0] in "LNZ":
        return unicodedata.ucd_3_2_0.category(character)[0] == now[0]
    return now != "Cn"  # what is not assigned may become a letter


def _encode_exactly(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    return _joined(tokenizer.tokenize_batch(texts), np.int64)


def _encode_settled(fast: Encode, exact: Encode, texts: Sequence[str]) -> Encoded:
    """Encode by `fast`, except for texts with characters on which libraries may differ."""
    doubtful = [number for number, text in enumerate(texts) if not is_settled(text)]
    if not doubtful:
        return fast(texts)
    rows = [fast([text]) if is_settled(text) else exact([text]) for text in texts]
    return Encoded(
        np.concatenate([row.tokens for row in rows], dtype=np.int64),
        np.concatenate([row.sizes for row in rows]),
    )


def _joined(ids: Sequence[Sequence[int]], dtype: npt.DTypeLike) -> Encoded:
    sizes = np.fromiter(map(len, ids), np.int64, count=len(ids))
    tokens = np.fromiter(chain.from_iterable(ids), dtype, count=int(sizes.sum()))
    return Encoded(tokens, sizes)


def _tiktoken(module: ModuleType, tokenizer: LibraryTokenizer) -> Encode:
    """Return an encoder by tiktoken: merges in order, then ids by table, as they may be any."""
    vocab: dict[str, int] = tokenizer.core.get_vocab(with_added_tokens=False)
    merges = json.loads(tokenizer.core.to_str())["model"]["merges"]
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in merges)
    pieces = [*byte_symbols(), *("".join(pair) for pair in pairs)]
    _require_own_piece(tokenizer, vocab, pieces)
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    ranks = {bytes(byte_of[s] for s in piece): rank for rank, piece in enumerate(pieces)}
    encoding = module.Encoding(
        "gpt2-files", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    id_of = np.array([vocab[piece] for piece in pieces], np.int64)

    def encode(texts: Sequence[str]) -> Encoded:
        found = _joined([encoding.encode_ordinary(text) for text in texts], np.int64)
        return found._replace(tokens=id_of[found.tokens])

    return encode


def _require_own_piece(
    tokenizer: LibraryTokenizer, vocab: dict[str, int], pieces: Sequence[str]
) -> None:
    """Refuse vocabularies on which tiktoken's algorithm is not byte-pair encoding.

    It joins neighbours whose joint text is a piece, byte-pair encoding those that a merge names.
    The two are the same where every piece is made once and its own text encodes to it alone.
    """
    model = tokenizer.core.model
    for piece in pieces:
        tokens = model.tokenize(piece)
        if len(tokens) != 1 or tokens[0].id != vocab[piece]:
            raise _unusable("tiktoken", f"the merges do not make the piece {piece!a} of its text")
    if len(set(pieces)) != len(pieces):
        raise _unusable("tiktoken", "two merges make the same piece")


def _gigatoken(module: ModuleType, tokenizer: LibraryTokenizer) -> Encode:
    encoder = module.Tokenizer.from_json(tokenizer.core.to_str())

    def encode(texts: Sequence[str]) -> Encoded:
        if not texts:
            return _joined([], np.int64)
        layout: Any = encoder.encode_batch(list(texts)).layout  # one ragged array of all texts
        offsets = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Encoded(tokens, np.diff(offsets))

    return encode


def _require_exact(
    name: str, tokenizer: Tokenizer, first_texts: Sequence[str], build: Build
) -> None:
    encode = build(name)
    texts = [*_PROBES, *first_texts]
    try:
        tokens, sizes = encode(texts)
    except Exception as error:  # whatever another version of the package may raise
        raise _unusable(name, f"it failed: {type(error).__name__}: {error}") from error
    exact = _encode_exactly(tokenizer, texts)
    if len(sizes) != len(texts) or (sizes != exact.sizes).any() or (tokens != exact.tokens).any():
        raise _unusable(name, _first_difference(texts, Encoded(tokens, sizes), exact))


def _first_difference(texts: Sequence[str], found: Encoded, exact: Encoded) -> str:
    if len(found.sizes) != len(texts):
        return f"{len(found.sizes)} results for {len(texts)} texts"
    borders = [np.cumsum(encoded.sizes)[:-1] for encoded in (found, exact)]
    rows = zip(texts, np.split(found.tokens, borders[0]), np.split(exact.tokens, borders[1]))
    text = next(text for text, one, other in rows if one.tolist() != other.tolist())
    return f"other ids than the tokenizer for {text[:60]!a}"


def _is_gpt2(tokenizer: Tokenizer) -> bool:
    return tokenizer.name == "GPT2BPETokenizer"


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _unusable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the encoder {name} cannot be used with this tokenizer and text",
        found=f"--encoder {name}: {why}",
        fix="use --encoder auto or --encoder tokenizers",
    )
