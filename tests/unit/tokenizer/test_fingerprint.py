"""One vocabulary has one fingerprint wherever its files lie, and another one differs."""

import json
from pathlib import Path

from megatron.tokenizer.fingerprint import fingerprint
from megatron.tokenizer.tokenizer import build_tokenizer


def bpe(folder: Path, *, swapped: bool = False) -> str:
    letters = [chr(ord("a") + at) for at in range(26)]
    if swapped:
        letters[0], letters[1] = letters[1], letters[0]
    folder.mkdir()
    vocab = {piece: at for at, piece in enumerate([*letters, "ab", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return fingerprint(
        build_tokenizer(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
        )
    )


def test_another_folder_is_the_same_and_another_order_is_not(tmp_path: Path) -> None:
    first = bpe(tmp_path / "a")
    assert bpe(tmp_path / "b") == first
    other = bpe(tmp_path / "c", swapped=True)
    assert other != first
    assert other.startswith("28 tokens, end of document 27")


def test_sizes_are_told_apart() -> None:
    found = {
        fingerprint(build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=size))
        for size in (1, 50, 5000)
    }
    assert len(found) == 3
