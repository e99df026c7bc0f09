"""Which tokenizer the flags ask for, and how many rows its embedding table gets.

`build_tokenizer()` builds any kind; each kind has a module of its own that is imported only
when asked for. A worker process gets a `TokenizerSpec` and builds its own: the libraries behind
the tokenizers hold native objects and threads that must not cross a fork.
"""

import dataclasses
import difflib
import importlib
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import ConfigError
from megatron.tokenizer.protocol import SpecialIds, Tokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "SpecialIds",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "padded_vocab_size",
    "require_eod",
    "true_vocab_size",
]


class _Kind(NamedTuple):
    """A tokenizer type: its module, and the fields it reads (alternatives in one tuple).

    `options` are read where they are given.
    """

    module: str
    needs: tuple[tuple[str, ...], ...]
    takes_extra_ids: bool = True
    options: tuple[str, ...] = ()


_HF_PATH = ("tokenizer_name_or_path", "vocab_file", "tokenizer_model")
_KINDS = {
    "GPT2BPETokenizer": _Kind("gpt2_bpe", (("vocab_file",), ("merge_file",))),
    "BertWordPieceLowerCase": _Kind("bert_wordpiece", (("vocab_file",),)),
    "BertWordPieceCase": _Kind("bert_wordpiece", (("vocab_file",),)),
    "PretrainedFromHF": _Kind("huggingface", (_HF_PATH,)),
    "HFTokenizer": _Kind("huggingface", (_HF_PATH,)),
    "HuggingFaceTokenizer": _Kind("huggingface", (_HF_PATH,)),
    "SentencePieceTokenizer": _Kind("sentence_piece", (("tokenizer_model",),)),
    "GPTSentencePieceTokenizer": _Kind("sentence_piece", (("tokenizer_model",),)),
    "Llama2Tokenizer": _Kind("sentence_piece", (("tokenizer_model",),)),
    "T5SentencePieceTokenizer": _Kind("sentence_piece", (("tokenizer_model",),)),
    "TikTokenizer": _Kind(
        "tiktoken_ranks",
        (("tokenizer_model",), ("tiktoken_pattern",)),
        takes_extra_ids=False,
        options=("vocab_size", "tiktoken_num_special_tokens"),
    ),
    "NullTokenizer": _Kind("plain", (("vocab_size",),), takes_extra_ids=False),
    "ByteTokenizer": _Kind("plain", (), takes_extra_ids=False),
}
TOKENIZER_TYPES = tuple(_KINDS)
_SOURCES = ("vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path", "vocab_size")
_FILES = _SOURCES[:-1]
# Scripts give these beside other types, where they mean nothing.
_OF_ONE_TYPE = ("tiktoken_pattern", "tiktoken_num_special_tokens")
# What is read of a folder, beside which gigabytes of a model may lie.
_IN_FOLDER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """The flags from which a tokenizer can be built again, in any process."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    tokenizer_name_or_path: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None

    @classmethod
    def of(cls, flags: Any) -> "TokenizerSpec":
        """Return the tokenizer of `TokenizerConfig`, or of a tool's flags of the same names."""
        return cls(
            tokenizer_type=flags.tokenizer_type or "",
            vocab_file=flags.vocab_file,
            merge_file=flags.merge_file,
            tokenizer_model=flags.tokenizer_model,
            tokenizer_name_or_path=flags.tokenizer_name_or_path,
            vocab_size=flags.vocab_size,
            vocab_extra_ids=flags.vocab_extra_ids,
            tiktoken_pattern=flags.tiktoken_pattern,
            tiktoken_num_special_tokens=flags.tiktoken_num_special_tokens,
        )

    def build(self) -> Tokenizer:
        """Read the files and make the tokenizer; raises ConfigError or DataError."""
        kind = _kind(self.tokenizer_type)
        values = self._values(kind)
        if kind.takes_extra_ids:
            values["vocab_extra_ids"] = self.vocab_extra_ids
        module = importlib.import_module(f"megatron.tokenizer.{kind.module}")
        tokenizer: Tokenizer = module.build(self.tokenizer_type, **values)
        return tokenizer

    def files(self) -> list[Path]:
        """Return the existing tokenizer files that are read, also those of a folder.

        A corpus records their digests and a run compares them, so both use this.
        """
        files: list[Path] = []
        for given in (getattr(self, field) for field in _FILES):
            if given is not None:
                path = Path(given)
                files += [path / name for name in _IN_FOLDER] if path.is_dir() else [path]
        return [path for path in files if path.is_file()]

    def _values(self, kind: _Kind) -> dict[str, str | int]:
        """Return the arguments of the kind's `build`, by the first alternative of each need."""
        given = {field: getattr(self, field) for field in _SOURCES}
        read = {*kind.options, *(field for alternatives in kind.needs for field in alternatives)}
        given |= {field: getattr(self, field) for field in _OF_ONE_TYPE if field in read}
        given = {field: value for field, value in given.items() if value is not None}
        values = {}
        for alternatives in kind.needs:
            present = [field for field in alternatives if field in given]
            if len(present) != 1:
                raise ConfigError(
                    f"{self.tokenizer_type} needs {' or '.join(map(_flag, alternatives))}",
                    found=_spelled({field: given[field] for field in present}) or "none of them",
                    fix=f"give exactly one: {_flag(alternatives[0])} {_example(alternatives[0])}",
                )
            values[alternatives[0]] = given.pop(present[0])
        values |= {field: given.pop(field) for field in kind.options if field in given}
        if given:
            raise ConfigError(
                f"{self.tokenizer_type} does not read {', '.join(map(_flag, given))}",
                found=_spelled(given),
                fix="leave it out, or choose the --tokenizer-type that reads it",
            )
        if self.vocab_extra_ids < 0 or (self.vocab_extra_ids and not kind.takes_extra_ids):
            raise ConfigError(
                f"{self.tokenizer_type} cannot add this number of extra ids",
                found=f"--vocab-extra-ids {self.vocab_extra_ids}",
                fix="leave --vocab-extra-ids out",
            )
        return values


def build_tokenizer(
    *,
    tokenizer_type: str,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    tokenizer_name_or_path: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    tiktoken_pattern: str | None = None,
) -> Tokenizer:
    """Return the tokenizer that the flags of these names describe; nothing is ever downloaded."""
    return TokenizerSpec(
        tokenizer_type=tokenizer_type,
        vocab_file=vocab_file,
        merge_file=merge_file,
        tokenizer_model=tokenizer_model,
        tokenizer_name_or_path=tokenizer_name_or_path,
        vocab_size=vocab_size,
        vocab_extra_ids=vocab_extra_ids,
        tiktoken_pattern=tiktoken_pattern,
    ).build()


def true_vocab_size(vocab_size: int, wanted: int | None) -> int:
    """Return the rows of real tokens: the tokenizer's size, or --true-vocab-size.

    Padding rows come after them, are zero, and take no part in a probability; these do.
    """
    if wanted is None:
        return vocab_size
    if wanted < vocab_size:
        raise ConfigError(
            "the model has fewer rows of vocabulary than the tokenizer has tokens",
            found=f"--true-vocab-size {wanted}, a tokenizer of {vocab_size} tokens",
            fix=f"use at least --true-vocab-size {vocab_size}, or leave it out",
        )
    return wanted


def padded_vocab_size(
    vocab_size: int, *, divisible_by: int, tp: int, pad_to: int | None = None
) -> int:
    """Return the rows of the embedding table, which tensor parallelism divides.

    Without `pad_to`: the next multiple of divisible_by * tp, as in Megatron. With `pad_to`
    (--pad-vocab-size-to): exactly that, refused where it cannot be kept.
    """
    if divisible_by < 1 or tp < 1:
        raise ConfigError(
            "the vocabulary must be divided by positive numbers",
            found=f"--make-vocab-size-divisible-by {divisible_by}, "
            f"--tensor-model-parallel-size {tp}",
            fix="use 1 or more for both",
        )
    if pad_to is None:
        multiple = divisible_by * tp
        return -(-vocab_size // multiple) * multiple
    if pad_to < vocab_size:
        raise ConfigError(
            f"the padded vocabulary is smaller than the tokenizer's: {pad_to} < {vocab_size}",
            found=f"--pad-vocab-size-to {pad_to}",
            fix=f"use at least {padded_vocab_size(vocab_size, divisible_by=divisible_by, tp=tp)}",
        )
    for divisor, flag in (
        (divisible_by, "--make-vocab-size-divisible-by"),
        (tp, "--tensor-model-parallel-size"),
    ):
        if pad_to % divisor:
            raise ConfigError(
                f"{pad_to} is not divisible by {divisor}",
                found=f"--pad-vocab-size-to {pad_to}, {flag} {divisor}",
                fix="use --pad-vocab-size-to "
                f"{padded_vocab_size(pad_to, divisible_by=divisible_by, tp=tp)}",
            )
    return pad_to


def require_eod(tokenizer: Tokenizer, flag: str) -> int:
    """Return the end-of-document id for a flag that requires one."""
    if tokenizer.eod is None:
        raise ConfigError(
            f"{flag} needs an end-of-document token, and {tokenizer.name} has none",
            found=tokenizer.eod_note,
            fix=f"leave {flag} out, or use a tokenizer with such a token",
        )
    return tokenizer.eod


def _kind(tokenizer_type: str) -> _Kind:
    if tokenizer_type not in _KINDS:
        lowered = {name.lower(): name for name in _KINDS}
        near = difflib.get_close_matches(tokenizer_type.lower(), lowered, n=1, cutoff=0.5)
        raise ConfigError(
            f"there is no tokenizer type {tokenizer_type!r}",
            found=f"--tokenizer-type {tokenizer_type}",
            fix=(f"did you mean {lowered[near[0]]}? " if near else "")
            + f"the types are {', '.join(TOKENIZER_TYPES)}",
        )
    return _KINDS[tokenizer_type]


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _spelled(values: dict[str, str | int]) -> str:
    return " ".join(f"{_flag(field)} {value}" for field, value in values.items())


def _example(field: str) -> str:
    return {
        "vocab_file": "vocab.json (GPT-2) or vocab.txt (BERT)",
        "merge_file": "merges.txt",
        "tokenizer_model": "tokenizer.model",
        "tokenizer_name_or_path": "FOLDER_WITH_tokenizer.json",
        "vocab_size": "50000",
        "tiktoken_pattern": "v2",
    }[field]
