"""Tokenizer files of a Hugging Face folder: the flags that read them, and writing our files.

Files are copied unchanged where transformers reads them unchanged. What a reader would get wrong: a
GPT-2 vocabulary needs a tokenizer.json beside it only for libraries that are not `transformers`, so
it is made from the two files; added tokens of SentencePiece have no place in a .model file, so a
model with them is refused rather than shortened.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import processors

from megatron import log
from megatron.checkpoint.files.durable import write_file
from megatron.checkpoint.source import WriteOptions
from megatron.config.data import TokenizerConfig
from megatron.config.fields import from_plain
from megatron.data.loading.t5_batch import decoder_start
from megatron.errors import CheckpointError, MegatronError
from megatron.json_values import JsonObject, JsonValue
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import TokenizerSpec

_T5, _OF_T5 = "T5SentencePieceTokenizer", "spiece.model"
_T5_SENTINELS = 100  # where no file says how many
# The files of a tokenizer in a folder that may hold gigabytes of other files.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "vocab.txt"),
    _OF_T5,
)
_UNNORMALIZED = "a  b\u2460"
_WITHOUT_FILES = ("NullTokenizer", "ByteTokenizer")
_WORD_PIECES = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}
_FOLDER_TOKENIZERS = ("HFTokenizer", "PretrainedFromHF", "HuggingFaceTokenizer")


@dataclass(frozen=True)
class TokenizerFiles:
    """The files to copy, the files to make, and the ids for config.json."""

    note: str
    copies: Mapping[str, Path] = field(default_factory=dict)  # name in the folder to source file
    made: Mapping[str, bytes] = field(default_factory=dict)
    special_ids: Mapping[str, int | None] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Put all of it into `directory`."""
        for name, path in self.copies.items():
            write_file(directory / name, path.read_bytes())
        for name, data in self.made.items():
            write_file(directory / name, data)


def described(directory: Path, vocab_rows: int) -> dict[str, JsonValue]:
    """Return the fields of `TokenizerConfig` that read the tokenizer in `directory`.

    Without one the model is a bare network, for which `NullTokenizer` is used.
    """
    rows = {"true_vocab_size": vocab_rows}
    if (directory / "tokenizer.json").is_file():
        return {
            "tokenizer_type": "HFTokenizer",
            "tokenizer_name_or_path": str(directory),
            **rows,
        }
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(directory / "vocab.json"),
            "merge_file": str(directory / "merges.txt"),
            **rows,
        }
    if (directory / "tokenizer.model").is_file():
        opens = _settings(directory).get("add_bos_token", True)
        return {
            "tokenizer_type": "Llama2Tokenizer" if opens else "GPTSentencePieceTokenizer",
            "tokenizer_model": str(directory / "tokenizer.model"),
            **rows,
        }
    if (directory / _OF_T5).is_file():
        return {
            "tokenizer_type": _T5,
            "tokenizer_model": str(directory / _OF_T5),
            "vocab_extra_ids": _extra_ids(directory),
            **rows,
        }
    if (directory / "vocab.txt").is_file():
        log.warning(
            f"{directory / 'vocab.txt'} is not read: ours adds two tokens to a WordPiece, which "
            "this model has no rows for; a tokenizer.json beside it has none of that "
            "(transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(..))"
        )
    # Its end of document is one more than its size.
    return {"tokenizer_type": "NullTokenizer", "vocab_size": vocab_rows - 1, **rows}


def _extra_ids(directory: Path) -> int:
    """Return how many sentinels stand behind the pieces of a T5."""
    count = _settings(directory).get("extra_ids", _T5_SENTINELS)
    if not isinstance(count, int) or count < 0:
        reason = f"extra_ids is {count!r}, and should be a number of sentinels"
        raise _not_settings(directory / "tokenizer_config.json", reason)
    return count


def _settings(directory: Path) -> JsonObject:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise _not_settings(path, str(error)) from error
    if not isinstance(settings, Mapping):
        raise _not_settings(path, "it is not an object")
    return settings


def _not_settings(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "the tokenizer_config.json of a Hugging Face folder cannot be read",
        found=f"{path}: {reason}",
        fix="copy it again, from the release that the weights are of",
    )


def plan(
    config: Mapping[str, Any], options: WriteOptions, *, has_decoder: bool = False
) -> TokenizerFiles:
    """Return the files for a run's tokenizer, or those of the folder that `options` name.

    Args:
        has_decoder: the model has a decoder beside its encoder, which begins with a token.

    Raises:
        CheckpointError: a file is missing, or `transformers` cannot express the tokenizer.
    """
    if not options.copy_tokenizer:
        return TokenizerFiles("left out, as asked")
    kind = config.get("tokenizer_type")
    if options.tokenizer is None and (kind is None or kind in _WITHOUT_FILES):
        return TokenizerFiles(f"none, {kind or 'the checkpoint names none'} has no files")
    given = options.tokenizer
    tokenizer = _built(config if given is None else described(given, 2))
    if given is not None:
        files = _folder_files(given, tokenizer)
    else:
        files = _files_of(config, tokenizer)
    if not has_decoder:
        return files
    first = {"decoder_start_token_id": decoder_start(tokenizer)}
    return replace(files, special_ids={**files.special_ids, **first})


def _files_of(config: Mapping[str, Any], tokenizer: Tokenizer) -> TokenizerFiles:
    kind = config["tokenizer_type"]
    if kind in _FOLDER_TOKENIZERS:
        given = next(
            config[name]
            for name in ("tokenizer_name_or_path", "vocab_file", "tokenizer_model")
            if config.get(name)
        )
        path = Path(given)
        return _folder_files(path if path.is_dir() else path.parent, tokenizer)
    if kind == "GPT2BPETokenizer":
        return _gpt2_files(config, tokenizer)
    if kind in _WORD_PIECES:
        return _word_piece_files(tokenizer, lowers=_WORD_PIECES[kind])
    if kind in ("Llama2Tokenizer", "GPTSentencePieceTokenizer"):
        return _sentence_piece_files(config, tokenizer, opens_with_bos=kind == "Llama2Tokenizer")
    if kind == _T5:
        return _t5_files(config, tokenizer)
    raise CheckpointError(
        "the tokenizer of the checkpoint has no form that transformers reads",
        found=f"--tokenizer-type {kind}",
        fix="give a folder of tokenizer files with --tokenizer, or leave them out with "
        "--no-copy-tokenizer",
    )


def _built(config: Mapping[str, Any]) -> Tokenizer:
    known = {name: config.get(name) for name in TokenizerSpec.__dataclass_fields__}
    try:
        flags = from_plain(TokenizerConfig, {n: v for n, v in known.items() if v is not None})
        return TokenizerSpec.of(flags).build()
    except MegatronError as error:
        raise CheckpointError(
            f"the tokenizer of the checkpoint cannot be read: {error.problem}",
            found=error.found,
            fix="give a folder of tokenizer files with --tokenizer, or leave them out with "
            "--no-copy-tokenizer",
        ) from error


def _folder_files(folder: Path, tokenizer: Tokenizer) -> TokenizerFiles:
    copies = {name: folder / name for name in FILES if (folder / name).is_file()}
    return TokenizerFiles(
        f"{', '.join(copies)} of {folder}", copies=copies, special_ids=_ids(tokenizer)
    )


def _gpt2_files(config: Mapping[str, Any], tokenizer: Tokenizer) -> TokenizerFiles:
    _refuse_extra_ids(tokenizer)
    assert isinstance(tokenizer, LibraryTokenizer)  # noqa: S101  # invariant: that is its kind
    name = None if tokenizer.eod is None else tokenizer.piece(tokenizer.eod)
    if name is not None:
        # Here its name in a text is text; in transformers it ends the document.
        tokenizer.core.add_special_tokens([name])
    special = {role: name for role in ("bos_token", "eos_token", "unk_token") if name is not None}
    settings: JsonObject = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        **special,
    }
    return TokenizerFiles(
        "vocab.json, merges.txt, and a tokenizer.json of both",
        copies={"vocab.json": Path(config["vocab_file"]), "merges.txt": Path(config["merge_file"])},
        made={
            "tokenizer.json": tokenizer.core.to_str(pretty=True).encode(),
            "tokenizer_config.json": _json(settings),
        },
        special_ids=_ids(tokenizer),
    )


def _word_piece_files(tokenizer: Tokenizer, *, lowers: bool) -> TokenizerFiles:
    """Return BERT's vocabulary, followed by the two tokens and the extra ids of our tokenizer."""
    assert isinstance(tokenizer, LibraryTokenizer)  # noqa: S101  # invariant: that is its kind
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    special = {
        f"{role}_token": tokenizer.piece(token)
        for role in ("unk", "sep", "pad", "cls", "mask")
        if (token := getattr(tokenizer, role)) is not None
    }
    # Here [MASK] in a text is text; in transformers it is the mask, hence the warning.
    tokenizer.core.add_special_tokens(list(special.values()))
    # What begins and ends a row: here the data does it, there the tokenizer.
    cls, sep = ((special[f"{role}_token"], getattr(tokenizer, role)) for role in ("cls", "sep"))
    tokenizer.core.post_processor = processors.BertProcessing(sep, cls)
    settings: JsonObject = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowers, **special}
    return TokenizerFiles(
        "vocab.txt and a tokenizer.json of it",
        made={
            "vocab.txt": "".join(f"{piece}\n" for piece in pieces).encode(),
            "tokenizer.json": tokenizer.core.to_str(pretty=True).encode(),
            "tokenizer_config.json": _json(settings),
        },
        special_ids={"pad_token_id": tokenizer.pad},
    )


def _sentence_piece_files(
    config: Mapping[str, Any], tokenizer: Tokenizer, *, opens_with_bos: bool
) -> TokenizerFiles:
    _refuse_extra_ids(tokenizer)
    assert isinstance(tokenizer, SentencePieceTokenizer)  # noqa: S101  # invariant: that is its kind
    if reason := _unlike_llama(tokenizer.processor):
        raise CheckpointError(
            "transformers would read the SentencePiece model as one of LLaMA's, which it is not",
            found=f"--tokenizer-model {config['tokenizer_model']}: {reason}",
            fix="give a folder of tokenizer files with --tokenizer, or leave them out with "
            "--no-copy-tokenizer",
        )
    special = {
        role: tokenizer.piece(token)
        for role, token in (
            ("bos_token", tokenizer.bos),
            ("eos_token", tokenizer.eod),
            ("unk_token", tokenizer.unk),
            ("pad_token", tokenizer.pad),
        )
        if token is not None
    }
    settings: JsonObject = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": opens_with_bos,
        "add_eos_token": False,
        "legacy": False,
        **special,
    }
    return TokenizerFiles(
        "tokenizer.model",
        copies={"tokenizer.model": Path(config["tokenizer_model"])},
        made={"tokenizer_config.json": _json(settings)},
        special_ids=_ids(tokenizer),
    )


def _t5_files(config: Mapping[str, Any], tokenizer: Tokenizer) -> TokenizerFiles:
    special = {
        f"{role}_token": tokenizer.piece(token)
        for role, token in (("eos", tokenizer.eod), ("unk", tokenizer.unk), ("pad", tokenizer.pad))
        if token is not None
    }
    settings: JsonObject = {
        "tokenizer_class": "T5Tokenizer",
        "extra_ids": len(tokenizer.extra_ids),
        **special,
    }
    return TokenizerFiles(
        _OF_T5,
        copies={_OF_T5: Path(config["tokenizer_model"])},
        made={"tokenizer_config.json": _json(settings)},
        special_ids=_ids(tokenizer),
    )


def _unlike_llama(processor: Any) -> str | None:
    """Return what `LlamaTokenizer` of transformers would not do; None if it does all.

    That tokenizer reads pieces and scores only.
    """
    if processor.normalize(_UNNORMALIZED) != "\u2581" + _UNNORMALIZED.replace(" ", "\u2581"):
        return "it changes white space or characters before it splits a text"
    ids = range(processor.get_piece_size())
    # Merges of a BPE are numbered; a unigram model has logarithms.
    if not all(float(processor.get_score(token)).is_integer() for token in ids):
        return "it is no byte-pair encoding"
    return None


def _refuse_extra_ids(tokenizer: Tokenizer) -> None:
    if tokenizer.extra_ids:
        raise CheckpointError(
            "the tokenizer has added tokens that its files do not hold",
            found=f"{len(tokenizer.extra_ids)} extra ids (--vocab-extra-ids)",
            fix="give a folder of tokenizer files with --tokenizer, or leave them out with "
            "--no-copy-tokenizer",
        )


def _ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    if tokenizer.cls is not None and tokenizer.eod is None:  # BERT's: tokens end no documents
        return {"pad_token_id": tokenizer.pad}
    return {
        "bos_token_id": tokenizer.eod if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.pad,
    }


def _json(values: JsonObject) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
