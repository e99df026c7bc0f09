"""GPT-2's byte-level byte-pair encoding, from a vocab.json and a merges.txt.

The name <|endoftext|> written in a text is text here, not the end of a document: only
--append-eod puts that id into a dataset.
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.huggingface import LibraryTokenizer, bytes_without_piece
from megatron.tokenizer.protocol import END_OF_TEXT, Tokenizer, existing_file, extra_names


def build(name: str, *, vocab_file: str, merge_file: str, vocab_extra_ids: int = 0) -> Tokenizer:
    """Read the two files; every piece that a merge makes must be in the vocabulary."""
    vocab_path = existing_file(vocab_file, "--vocab-file")
    merge_path = existing_file(merge_file, "--merge-file")
    vocab = _read_vocab(vocab_path)
    try:
        model = models.BPE.from_file(str(vocab_path), str(merge_path))
    except Exception as error:  # the library raises bare Exception for every damaged file
        raise DataError(
            "the merges do not fit the vocabulary",
            found=f"--vocab-file {vocab_path} --merge-file {merge_path}: {error}",
            fix="take vocab.json and merges.txt from the same training of the tokenizer",
        ) from error
    core = tokenizers.Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(extra_names(vocab_extra_ids))
    id_of_piece: dict[str, int] = core.get_vocab(with_added_tokens=True)
    eod = vocab.get(END_OF_TEXT)
    return LibraryTokenizer(
        name=name,
        vocab_size=max(id_of_piece.values()) + 1,
        core=core,
        absent_bytes=bytes_without_piece(vocab),
        eod=eod,
        eod_note=f"looked for {END_OF_TEXT} in {vocab_path}"
        + ("" if eod is not None else ": not there"),
        extra_ids=tuple(id_of_piece[token] for token in extra_names(vocab_extra_ids)),
    )


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _not_a_vocab(path, str(error)) from error
    if not isinstance(vocab, dict) or not vocab:
        raise _not_a_vocab(path, "it holds no pairs of piece and id")
    ids = list(vocab.values())
    if not all(type(token) is int and token >= 0 for token in ids) or len(set(ids)) != len(ids):
        raise _not_a_vocab(path, "the ids are not distinct integers from 0 on")
    return vocab


def _not_a_vocab(path: Path, reason: str) -> DataError:
    return DataError(
        "the vocabulary is not a GPT-2 vocab.json",
        found=f"--vocab-file {path}: {reason}",
        fix="--vocab-file is the JSON of pieces and ids, --merge-file the text of merges",
    )
