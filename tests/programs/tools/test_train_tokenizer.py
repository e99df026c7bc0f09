"""Training a byte-level BPE: the same files each time, and a word when the text is too small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError, MachineError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.unit.tokenizer.vocabularies import TEXT
from tools.train_tokenizer import OUTPUT_NAMES, main

ROOT = Path(__file__).resolve().parents[3]


def corpus(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    return path


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    for run in ("a", "b"):
        command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py")]
        command += ["--input", str(source), "--json-key", "body", "--vocab-size", "290"]
        environment = os.environ | {"PYTHONHASHSEED": str(ord(run))}
        subprocess.run(
            [*command, "--output", str(tmp_path / run)],
            cwd=tmp_path, check=True, capture_output=True, timeout=120, env=environment,
        )  # fmt: skip
    for name in OUTPUT_NAMES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    vocab = json.loads((tmp_path / "a" / "vocab.json").read_text())
    assert list(vocab.values()) == list(range(290))
    assert vocab["<|endoftext|>"] == 289


def test_a_small_text_says_how_many_pieces_it_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("ab ab ab")
    main(["--input", str(text), "--output", str(tmp_path), "--vocab-size", "1000"])
    output = capsys.readouterr().out
    size = build_tokenizer(
        tokenizer_type="HFTokenizer", tokenizer_name_or_path=str(tmp_path)
    ).vocab_size
    assert f"too small for --vocab-size 1000: the vocabulary has {size}" in output
    assert 256 < size < 270


def test_a_text_without_a_pair_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("a")
    with pytest.raises(DataError, match="no pair of letters occurs often enough"):
        main(["--input", str(text), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_must_hold_every_byte(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no room for every byte"):
        main(["--input", str(corpus(tmp_path)), "--json-key", "body", "--vocab-size", "256",
              "--output", str(tmp_path / "out")])  # fmt: skip


def test_existing_files_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    flags = ["--input", str(corpus(tmp_path)), "--json-key", "body", "--output", str(tmp_path)]
    (tmp_path / "merges.txt").write_text("mine")
    with pytest.raises(ConfigError, match="the output exists"):
        main(flags)
    assert (tmp_path / "merges.txt").read_text() == "mine"
    main([*flags, "--overwrite"])
    assert (tmp_path / "merges.txt").read_text().startswith("#version")


def test_a_disk_that_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tools.preprocessing.text_output.os.fsync", refuse)
    with pytest.raises(MachineError, match="cannot write"):
        main(["--input", str(corpus(tmp_path)), "--json-key", "body",
              "--output", str(tmp_path / "out")])  # fmt: skip
    assert list((tmp_path / "out").iterdir()) == []


def test_a_wordpiece_is_read_by_bert_and_is_the_same_twice(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    words = ["--input", str(source), "--json-key", "body", "--type", "wordpiece"]
    for run in ("a", "b"):
        main([*words, "--vocab-size", "200", "--output", str(tmp_path / run)])
    first, second = ((tmp_path / run / "vocab.txt").read_bytes() for run in ("a", "b"))
    assert first == second
    lines = first.decode().splitlines()
    assert lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert not any(character.isupper() for line in lines[5:] for character in line)
    built = build_tokenizer(
        tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "a" / "vocab.txt")
    )
    tokens = built.tokenize(TEXT)
    assert tokens
    assert built.unk not in tokens


def test_a_wordpiece_needs_room_and_text(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("ab")
    words = ["--input", str(text), "--output", str(tmp_path / "out"), "--type", "wordpiece"]
    with pytest.raises(ConfigError, match="no room for more than the special tokens and every"):
        main([*words, "--vocab-size", "9"])
    text.write_text(" \n")
    with pytest.raises(DataError, match="nothing to learn a vocabulary from"):
        main(words)
