"""Tokenizers that the `tokenizers` library runs: `tokenizer.json`, and the core of two others.

A reader would expect `encode` of the library as it is; three of its habits lose or add text
silently and are turned off or caught here: truncation and padding stored in the file, the [CLS]/<s>
that a post-processor adds, and byte-pair models that drop text they have no piece for. Names
written in the text (`<|im_start|>`) become their ids, as in that library.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from megatron.errors import ConfigError, DataError
from megatron.json_values import JsonObject, JsonValue, object_at
from megatron.tokenizer.protocol import (
    END_OF_TEXT,
    SpecialIds,
    Tokenizer,
    checked_ids,
    existing_file,
    extra_names,
)

# Names of special tokens in families of models, tried where no file declares them.
_NAMES = {
    "eos_token": (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>"),
    "cls_token": ("[CLS]", "<cls>"),
    "sep_token": ("[SEP]", "<sep>"),
    "mask_token": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True, kw_only=True)
class LibraryTokenizer(SpecialIds):
    """A `tokenizers.Tokenizer` that raises an error when it would lose text."""

    name: str
    vocab_size: int
    core: tokenizers.Tokenizer = field(repr=False)
    absent_bytes: bytes = b""  # bytes that a byte-level vocabulary has no piece for
    may_drop_characters: bool = False  # a model that skips what is not in its vocabulary

    def tokenize(self, text: str) -> list[int]:
        encoding = self.core.encode(text, add_special_tokens=False)
        if self.absent_bytes:
            self._refuse_absent_bytes(text)
        if self.may_drop_characters:
            self._refuse_dropped_characters(text, encoding)
        return list(encoding.ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.may_drop_characters:  # only the slower call returns which characters were seen
            return [self.tokenize(text) for text in texts]
        if self.absent_bytes:
            for text in texts:
                self._refuse_absent_bytes(text)
        encodings = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Iterable[int]) -> str:
        text: str = self.core.decode(checked_ids(ids, self.vocab_size), skip_special_tokens=False)
        return text

    def piece(self, token_id: int) -> str:
        checked = checked_ids([token_id], self.vocab_size)[0]
        return self.core.id_to_token(checked) or ""

    def _refuse_absent_bytes(self, text: str) -> None:
        if self.core.normalizer is not None:
            text = self.core.normalizer.normalize_str(text)
        absent = set(text.encode()).intersection(self.absent_bytes)
        if absent:
            raise _lost_text(self.name, f"byte 0x{min(absent):02x}", text)

    def _refuse_dropped_characters(self, text: str, encoding: tokenizers.Encoding) -> None:
        seen = bytearray(len(text))
        for start, end in encoding.offsets:
            seen[start:end] = b"\x01" * (end - start)
        unseen = {character for position, character in enumerate(text) if not seen[position]}
        if any(not character.isspace() for character in unseen):
            # Offsets count letters that were kept, so behind a skipped one they are shifted: the
            # culprit is better known by the vocabulary.
            culprit = next((c for c in text if self.core.token_to_id(c) is None), min(unseen))
            raise _lost_text(self.name, f"U+{ord(culprit):04X}", text)


def build(name: str, *, tokenizer_name_or_path: str, vocab_extra_ids: int = 0) -> Tokenizer:
    """Read a `tokenizer.json` or a folder that holds one, with the config files beside it."""
    path = _tokenizer_json(tokenizer_name_or_path)
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every damaged file
        raise DataError(
            "the tokenizer.json cannot be read",
            found=f"{path}: {error}",
            fix="copy the file again, or save it with a current version of `tokenizers`",
        ) from error
    core.no_truncation()
    core.no_padding()
    declared = _declared(path.parent)
    _add_declared_tokens(core, declared, path.parent)
    core.add_special_tokens(extra_names(vocab_extra_ids))
    vocab = core.get_vocab(with_added_tokens=True)
    absent_bytes, may_drop = _losses(core, description.get("model") or {}, vocab)
    return LibraryTokenizer(
        name=name,
        vocab_size=max(vocab.values()) + 1,
        core=core,
        absent_bytes=absent_bytes,
        may_drop_characters=may_drop,
        extra_ids=tuple(vocab[token] for token in extra_names(vocab_extra_ids)),
        unk=_unknown(description.get("model") or {}, vocab),
        **_special_ids(declared, vocab, path),
    )


def byte_symbols() -> tuple[str, ...]:
    """Return GPT-2's characters of bytes 0..255: the byte where printable, else U+0100 on.

    Radford et al. 2019, section 2.2: byte-level pairs with no unknown token.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printing else chr(next(others)) for byte in range(256))


def bytes_without_piece(vocab: dict[str, int]) -> bytes:
    """Return the bytes of UTF-8 text that a byte-level vocabulary cannot spell."""
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # RFC 3629; GPT-NeoX leaves them out
    return bytes(
        byte
        for byte, symbol in enumerate(byte_symbols())
        if symbol not in vocab and byte not in never_in_utf8
    )


def _tokenizer_json(given: str) -> Path:
    path = Path(given)
    if path.is_dir():
        return existing_file(path / "tokenizer.json", "--tokenizer-name-or-path")
    if not path.exists():
        raise ConfigError(
            "the tokenizer is not on this machine, and nothing is downloaded during a run",
            found=f"--tokenizer-name-or-path {given}",
            fix="give a tokenizer.json or a folder that holds one; to fetch it once: "
            f"hf download {given} tokenizer.json tokenizer_config.json --local-dir FOLDER",
        )
    return path


def _declared(folder: Path) -> dict[str, JsonValue]:
    """Return the special tokens of tokenizer_config.json, then of special_tokens_map.json."""
    declared: dict[str, JsonValue] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / file
        if path.is_file():
            try:
                declared |= json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{file} beside the tokenizer cannot be read",
                    found=f"{path}: {error}",
                    fix="copy the file again, or remove it to go by tokenizer.json alone",
                ) from error
    return declared


def _add_declared_tokens(core: tokenizers.Tokenizer, declared: JsonObject, folder: Path) -> None:
    """Add the added tokens of tokenizer_config.json as whole words, at their ids."""
    wanted = object_at(declared, "added_tokens_decoder")
    for number in sorted(wanted, key=int):
        token_id, token = int(number), object_at(wanted, number)
        content = str(token["content"])
        options = {
            key: bool(token[key])
            for key in ("single_word", "lstrip", "rstrip", "normalized")
            if key in token
        }
        added = tokenizers.AddedToken(content, special=bool(token.get("special")), **options)
        (core.add_special_tokens if token.get("special") else core.add_tokens)([added])
        if core.token_to_id(content) != token_id:
            raise DataError(
                "tokenizer_config.json and tokenizer.json give one token two ids",
                found=f"{content!r} is {token_id} in the first and "
                f"{core.token_to_id(content)} in the second, in {folder}",
                fix="take both files from the same release of the tokenizer",
            )


def _losses(
    core: tokenizers.Tokenizer, model: JsonObject, vocab: dict[str, int]
) -> tuple[bytes, bool]:
    """Return the text that the model would drop: (bytes without a piece, any character)."""
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return b"", False  # the others have an unknown piece or raise by themselves
    if "ByteLevel" in repr(core.pre_tokenizer):
        return bytes_without_piece(vocab), False
    return b"", True


def _unknown(model: JsonObject, vocab: dict[str, int]) -> int | None:
    unk_id = model.get("unk_id")
    if isinstance(unk_id, int | float | str):
        return int(unk_id)
    return vocab.get(str(model.get("unk_token") or ""))


def _special_ids(declared: JsonObject, vocab: dict[str, int], path: Path) -> dict[str, Any]:
    """Return ids by `SpecialIds` field: the declared name, else the only well-known one."""
    found: dict[str, int | str | None] = {}
    for role, names in _NAMES.items():
        name = declared.get(role)
        name = name.get("content") if isinstance(name, Mapping) else name
        is_known = isinstance(name, str) and name in vocab
        present = [str(name)] if is_known else [known for known in names if known in vocab]
        found[role.removesuffix("_token")] = vocab[present[0]] if len(present) == 1 else None
        if role == "eos_token":
            candidates = f"{role} {name!r} of {path.parent}" if name else " ".join(names)
            seen = ", ".join(present) if present else "none"
            found["eod_note"] = f"looked for {candidates} in {path}: {seen}" + (
                "; name one as eos_token in tokenizer_config.json" if len(present) != 1 else ""
            )
    found["eod"] = found.pop("eos")
    return found


def _lost_text(name: str, what: str, text: str) -> DataError:
    return DataError(
        f"{name} has no piece for {what} and no unknown token, so the text would be lost",
        found=repr(text if len(text) <= 60 else text[:60] + "..."),
        fix="use a vocabulary that has all 256 bytes, or clean the text first",
    )
