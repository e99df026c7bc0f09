"""BERT's WordPiece, from a vocab.txt with one piece a line.

As in Megatron, [BOS], [EOS] and the extra ids are added behind the vocabulary, so `vocab_size` is
two more than the file has lines. [MASK] written in a text is text, not the mask. There is no end
of document: BERT's corpora are split into sentences instead.
"""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.protocol import Tokenizer, existing_file, extra_names

_UNKNOWN = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", _UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
# A longer word is unknown as a whole, as in BERT's original tokenization code.
_MAX_CHARACTERS_PER_WORD = 200


def build(name: str, *, vocab_file: str, vocab_extra_ids: int = 0) -> Tokenizer:
    """Read the vocabulary; BertWordPieceLowerCase lowers the case and strips accents."""
    path = existing_file(vocab_file, "--vocab-file")
    vocab = _read_vocab(path)
    for added in ("[BOS]", "[EOS]", *extra_names(vocab_extra_ids)):
        vocab.setdefault(added, len(vocab))
    core = tokenizers.Tokenizer(
        models.WordPiece(
            vocab, unk_token=_UNKNOWN, max_input_chars_per_word=_MAX_CHARACTERS_PER_WORD
        )
    )
    core.normalizer = normalizers.BertNormalizer(lowercase=name == "BertWordPieceLowerCase")
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return LibraryTokenizer(
        name=name,
        vocab_size=len(vocab),
        core=core,
        eod=None,
        eod_note="BERT's corpora have sentences (--split-sentences), no end-of-document token",
        pad=vocab["[PAD]"],
        bos=vocab["[BOS]"],
        unk=vocab[_UNKNOWN],
        cls=vocab["[CLS]"],
        sep=vocab["[SEP]"],
        mask=vocab["[MASK]"],
        extra_ids=tuple(vocab[token] for token in extra_names(vocab_extra_ids)),
    )


def _read_vocab(path: Path) -> dict[str, int]:
    vocab: dict[str, int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            piece = line.strip()
            if piece in vocab:
                raise DataError(
                    "a piece stands twice in the vocabulary, which would shift every id after it",
                    found=f"{path}:{number}: {piece!r}, first on line {vocab[piece] + 1}",
                    fix="take the vocab.txt as it was released",
                )
            vocab[piece] = number - 1
    missing = [piece for piece in SPECIAL_TOKENS if piece not in vocab]
    if missing:
        raise DataError(
            "the vocabulary is not a BERT vocab.txt",
            found=f"--vocab-file {path} has {len(vocab)} lines and lacks {', '.join(missing)}",
            fix="give a text file with one piece a line, these among them",
        )
    return vocab
