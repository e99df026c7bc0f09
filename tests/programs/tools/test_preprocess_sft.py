"""Dialogues to tokens and masks, as a user starts it; and the errors of lines without one."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.samples.sft_dataset import SFTCorpus
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.unit.tokenizer.vocabularies import write_bert
from tools.preprocess_sft import _encoder, main

ROOT = Path(__file__).resolve().parents[3]
BYTES = ("--tokenizer-type", "ByteTokenizer")
GOOD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \u00e9"}]


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preprocess(source: Path, prefix: Path, *flags: str) -> None:
    main(["--input", str(source), "--output-prefix", str(prefix), *flags])


def learned_texts(prefix: Path) -> list[str]:
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    corpus = SFTCorpus(str(prefix))
    documents = [corpus.document(number) for number in range(len(corpus))]
    return [tokenizer.detokenize(d.tokens[d.is_input == 0].tolist()) for d in documents]


@pytest.mark.parametrize(
    ("template", "learned", "tokens"),
    [
        ("chatml", "Hello \u00e9<|im_end|>", 71),
        ("plain", "Hello \u00e9<|endoftext|>", 40),
    ],
)
def test_only_the_answers_and_their_ends_are_learned(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str,
    learned: str,
    tokens: int,
) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}, {"messages": GOOD[1:] * 2}])
    preprocess(source, tmp_path / "new" / "out", *BYTES, "--template", template)
    assert learned_texts(tmp_path / "new" / "out") == [learned, learned * 2]
    corpus = SFTCorpus(str(tmp_path / "new" / "out"))
    assert corpus.tokens.dtype == np.uint16
    assert corpus.lengths[0] == tokens
    assert corpus.tokens.metadata is not None
    assert corpus.tokens.metadata.eod == 256
    printed = capsys.readouterr()
    assert "2 dialogues, " in printed.out
    assert printed.out.splitlines()[-1] == str(tmp_path / "new" / "out")
    assert ("spells '<|im_end|>' with 10 tokens" in printed.err) == (template == "chatml")


def test_compressed_input_and_another_key(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(json.dumps({"chat": GOOD}).encode()))
    preprocess(source, tmp_path / "out", *BYTES, "--json-key", "chat")
    assert learned_texts(tmp_path / "out") == ["Hello \u00e9<|im_end|>"]


BAD = [
    ({"messages": []}, "a dialogue is a list of messages"),
    ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
    ({"text": "x"}, "no key 'messages'"),
    ([1], "not a JSON object"),
    ({"messages": [*GOOD, {"role": "user", "content": "<|im_end|>"}]}, "writes itself"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_line_ends_the_run_with_its_number(tmp_path: Path, row: object, message: str) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}, row])
    with pytest.raises(DataError, match=message) as raised:
        preprocess(source, tmp_path / "out", *BYTES)
    assert f"{source}:2" in str(raised.value)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_bad_lines_can_be_left_out_and_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row, _ in BAD]
    source = write_lines(tmp_path / "a.jsonl", [*rows, {"messages": GOOD}])
    preprocess(source, tmp_path / "out", *BYTES, "--on-bad-line", "skip")
    assert learned_texts(tmp_path / "out") == ["Hello \u00e9<|im_end|>"]
    output = capsys.readouterr().err
    assert "left out 5 lines" in output
    assert f"{source}:1" in output


def test_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [row for row, _ in BAD])
    with pytest.raises(DataError, match="no dialogue is left") as raised:
        preprocess(source, tmp_path / "out", *BYTES, "--on-bad-line", "skip")
    assert "5 bad lines" in str(raised.value)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_existing_outputs_are_kept_unless_told(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    preprocess(source, tmp_path / "out", *BYTES)
    with pytest.raises(ConfigError, match="the output exists"):
        preprocess(source, tmp_path / "out", *BYTES)
    write_lines(source, [{"messages": GOOD}] * 2)
    preprocess(source, tmp_path / "out", *BYTES, "--overwrite")
    assert len(SFTCorpus(str(tmp_path / "out"))) == 2


def test_plain_text_holds_no_dialogues(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="this file has none"):
        preprocess(tmp_path / "a.txt", tmp_path / "out", *BYTES)


def test_the_template_of_a_folder_writes_the_dialogues(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    preprocess(source, tmp_path / "out", *BYTES, "--template", str(tmp_path))
    assert learned_texts(tmp_path / "out") == ["Hello \u00e9</s>"]
    tokens = SFTCorpus(str(tmp_path / "out")).document(0).tokens.tolist()
    assert bytes(tokens).decode() == "<user>Hi</s>\n<assistant>Hello \u00e9</s>\n"


def test_a_template_whose_answers_have_no_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    with pytest.raises(ConfigError, match="would not learn to stop"):
        preprocess(source, tmp_path / "out", *BYTES, "--template", str(tmp_path))


def test_the_plain_template_needs_an_end_of_document(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    vocab = write_bert(tmp_path)
    flags = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab))
    with pytest.raises(ConfigError, match="ends answers with a token that the tokenizer lacks"):
        preprocess(source, tmp_path / "out", *flags, "--template", "plain")


def test_what_opens_a_text_opens_a_dialogue_once() -> None:
    class Opening:
        bos = 1

        def tokenize(self, text: str) -> list[int]:
            return [1, *text.encode()] if text else []

        def tokenize_batch(self, texts: list[str]) -> list[list[int]]:
            return [self.tokenize(text) for text in texts]

    assert _encoder(Opening())(["a", "b", "", "c"]) == [[1, 97], [98], [], [99]]  # type: ignore[arg-type]


def test_the_program_runs_and_fails_as_programs_do(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    command = [sys.executable, str(ROOT / "tools" / "preprocess_sft.py"), "--input", str(source)]
    command += ["--output-prefix", "out", *BYTES]
    done = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "out"
    again = subprocess.run(
        command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == ConfigError.exit_code
    assert "the output exists" in again.stderr
