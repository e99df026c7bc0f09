"""Tiny vocabularies, made on the spot: no test of tokenizers needs a file from elsewhere."""

import json
from pathlib import Path

import sentencepiece

from tools.train_tokenizer import main as train_tokenizer

_PHRASE = "the quick brown fox jumps over the lazy dog and the cat sat on the mat again"
WORDS = tuple(_PHRASE.split())
TEXT = "\n".join(
    " ".join(WORDS[(start + step) % len(WORDS)] for step in range(9)) for start in range(200)
)


def write_gpt2(folder: Path, vocab_size: int = 300) -> dict[str, str]:
    """vocab.json, merges.txt and tokenizer.json in `folder`; the flags of GPT2BPETokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "training.txt"
    text.write_text(TEXT)
    train_tokenizer(
        ["--input", str(text), "--output", str(folder), "--vocab-size", str(vocab_size)]
    )
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


def write_bert(folder: Path) -> Path:
    """A vocab.txt of 12 pieces."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces += ["the", "dog", "play", "##ing", "##s", ".", "Dog"]
    path = folder / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n")
    return path


def write_sentencepiece(folder: Path, **options: object) -> Path:
    """A model of 60 pieces; `options` go to SentencePiece's trainer."""
    text = folder / "training.txt"
    text.write_text(TEXT)
    settings: dict[str, object] = {"vocab_size": 60, "model_type": "bpe", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tiny"), **(settings | options)
    )
    return folder / "tiny.model"


def write_tokenizer_json(folder: Path, **changes: object) -> Path:
    """The tokenizer.json of `write_gpt2` with top-level entries replaced."""
    write_gpt2(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path
