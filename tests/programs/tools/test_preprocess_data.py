"""Text to .bin/.idx: what is written, in which order, and what is left behind when it fails."""

import gzip
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import ConfigError, DataError, MachineError
from megatron.tokenizer.huggingface import byte_symbols
from megatron.tokenizer.tokenizer import TokenizerSpec, build_tokenizer
from tests.conftest import optional_data_folder
from tests.support.checkpoints.small_disk import small_disk
from tests.support.output import without_times
from tests.unit.tokenizer.test_punkt import write_model
from tests.unit.tokenizer.vocabularies import write_bert, write_gpt2
from tools.preprocess_data import main
from tools.preprocessing.documents import DocumentRow, TextRule
from tools.preprocessing.encoding import (
    WINDOW_PER_WORKER,
    Chunk,
    EncodedChunk,
    EncodeSettings,
    encode_chunk,
    encode_in_order,
    read_chunks,
)

ROOT = Path(__file__).resolve().parents[3]
BYTES = ("--tokenizer-type", "ByteTokenizer")
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000")


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def preprocess(source: Path | list[Path], prefix: Path, *flags: str) -> None:
    sources = source if isinstance(source, list) else [source]
    main(["--input", *map(str, sources), "--output-prefix", str(prefix), *flags])


def texts_of(prefix: Path, key: str = "text", level: str = "document") -> list[str]:
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    dataset = MMapIndexedDataset(f"{prefix}_{key}_{level}")
    return [tokenizer.detokenize(dataset[index].tolist()) for index in range(len(dataset))]


def test_each_document_is_an_item_ended_by_its_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["first", "", "zweites \u00e9"])
    preprocess(source, tmp_path / "new" / "out", *BYTES, "--append-eod")
    assert texts_of(tmp_path / "new" / "out") == [
        "first<|endoftext|>", "zweites \u00e9<|endoftext|>",
    ]  # fmt: skip
    output = capsys.readouterr().out
    assert f"--data-path {tmp_path}/new/out_text_document" in output
    assert "dropped 1 documents" in output
    assert ["text", "2", "2", "17", "34"] in [line.split() for line in output.splitlines()]
    metadata = json.loads((tmp_path / "new" / "out_text_document.meta.json").read_text())
    assert metadata["tokenizer_type"] == "ByteTokenizer"
    assert (metadata["eod"], metadata["num_tokens"]) == (256, 17)


def test_without_the_flag_no_token_is_appended(tmp_path: Path) -> None:
    preprocess(write_jsonl(tmp_path / "a.jsonl", ["a", "b"]), tmp_path / "out", *BYTES)
    assert texts_of(tmp_path / "out") == ["a", "b"]


def test_three_workers_write_what_one_writes(tmp_path: Path) -> None:
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--chunk-size", "3"]
    files = write_gpt2(tmp_path / "tokenizer")
    flags += ["--vocab-file", files["vocab_file"], "--merge-file", files["merge_file"]]
    source = write_jsonl(
        tmp_path / "a.jsonl", [f"document {n} the quick fox" * (n % 7) for n in range(200)]
    )
    for workers in ("1", "3"):
        preprocess(source, tmp_path / workers, *flags, "--workers", workers)
    for suffix in (".bin", ".idx", ".meta.json"):
        one, three = (tmp_path / f"{n}_text_document{suffix}" for n in (1, 3))
        assert one.read_bytes() == three.read_bytes()


def test_the_reader_stays_within_the_window(tmp_path: Path) -> None:
    read = 0

    def chunks() -> Iterator[Chunk]:
        nonlocal read
        for number in range(60):
            read += 1
            yield Chunk(Path("f.txt"), [DocumentRow(number, str(number).encode())], 1)

    settings = EncodeSettings(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=99))
    furthest_ahead = 0
    for taken, encoded in enumerate(
        encode_in_order(chunks(), partial(encode_chunk, settings), workers=2)
    ):
        assert encoded.columns[0].tokens.tolist() == [taken]
        furthest_ahead = max(furthest_ahead, read - taken)
    assert read == 60
    assert furthest_ahead <= 2 * WINDOW_PER_WORKER


def test_a_worker_that_dies_is_an_error_and_not_a_hang() -> None:
    chunks = (Chunk(Path("f.txt"), [], 0) for _ in range(3))
    with pytest.raises(MachineError, match="a worker process died"):
        list(encode_in_order(chunks, _die, workers=2))


def _die(chunk: Chunk) -> EncodedChunk:
    os._exit(9)


def test_a_chunk_is_closed_early_when_it_grows_large(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x" * 3_000_000] * 5)
    chunks = list(read_chunks([source], TextRule(), chunk_size=25))
    assert [len(chunk.rows) for chunk in chunks] == [2, 2, 1]
    assert sum(chunk.disk_bytes for chunk in chunks) == source.stat().st_size


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_line_stops_everything_and_leaves_nothing(tmp_path: Path, workers: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["good"] * 70)
    with source.open("a") as file:
        file.write('{"text": "cut off\n')
    out = tmp_path / "out"
    with pytest.raises(DataError, match="not valid JSON") as caught:
        preprocess(source, out / "x", *BYTES, "--workers", workers)
    assert f"{source}:71" in str(caught.value)
    assert list(out.iterdir()) == []


BAD_LINES = [
    (b'{"text": "cut off', "2: Invalid control", "not valid JSON"),
    (b'{"text": "\xff"}', "3: byte 0xff", "not UTF-8"),
    (b'{"body": "x"}', "4: keys 'body'", "has no key 'text'"),
    (b'{"text": 5}', "5: int", "not a string"),
    (b'["x"]', "6: a list", "not a JSON object"),
    (b"[" * 100_000, "7: ", "not valid JSON"),
    (b'{"text": "\\ud800"}', "8: ", "half of a surrogate pair"),
]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_lines_are_skipped_counted_and_named_when_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    source = tmp_path / "a.jsonl"
    bad = [line for line, _, _ in BAD_LINES]
    source.write_bytes(b"\n".join([b'{"text": "first"}', *bad, b'{"text": "last"}', b""]))
    flags = ("--on-bad-line", "skip", "--workers", workers, "--chunk-size", "3")
    preprocess(source, tmp_path / "out", *BYTES, *flags)
    assert texts_of(tmp_path / "out") == ["first", "last"]
    output = capsys.readouterr().err
    assert "skipped 7 bad lines" in output
    for _, place, problem in BAD_LINES[:5]:
        assert any(f"{source}:{place}" in line and problem in line for line in output.splitlines())
    assert "and 2 more" in output
    assert f"{source}:7" not in output


def test_bad_lines_leave_several_keys_aligned(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"q": "q1", "a": "a1"}\n{"q": "q2"}\n{"q": "q3", "a": "a3"}\n')
    flags = ("--json-keys", "q", "a", "--on-bad-line", "skip")
    preprocess(source, tmp_path / "out", *BYTES, *flags)
    assert texts_of(tmp_path / "out", "q") == ["q1", "q3"]
    assert texts_of(tmp_path / "out", "a") == ["a1", "a3"]


def test_a_text_file_may_have_bad_documents_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xe9\nthree\n")
    flags = ("--text-documents", "lines", "--on-bad-line", "skip")
    preprocess(tmp_path / "a.txt", tmp_path / "out", *BYTES, *flags)
    assert texts_of(tmp_path / "out") == ["one", "three"]
    assert f"{tmp_path / 'a.txt'}:2: byte 0xe9" in capsys.readouterr().err


def test_nothing_but_bad_lines_is_an_error(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "y"], key="body")
    with pytest.raises(DataError, match="no document is left") as caught:
        preprocess(source, tmp_path / "out" / "x", *BYTES, "--on-bad-line", "skip")
    assert f"2 bad lines: {source}:1" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_sidecar_says_which_files_the_tokenizer_was_read_from(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the dog"])
    files = write_gpt2(tmp_path / "tokenizer")
    gpt2 = ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files["vocab_file"])
    folder = ("--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path")
    (tmp_path / "tokenizer" / "weights.bin").write_text("large")
    for name, flags in (
        ("gpt2", (*gpt2, "--merge-file", files["merge_file"])),
        ("folder", (*folder, str(tmp_path / "tokenizer"))),
    ):
        preprocess(source, tmp_path / name, *flags)
    sidecars = [
        json.loads((tmp_path / f"{name}_text_document.meta.json").read_text())["tokenizer_files"]
        for name in ("gpt2", "folder")
    ]
    assert [list(files) for files in sidecars] == [["merges.txt", "vocab.json"], ["tokenizer.json"]]
    assert sidecars[0]["vocab.json"] == _sha256(Path(files["vocab_file"]))


def started_in_the_middle(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    """The program in a process group of its own, as a terminal makes one, when work has begun."""
    source = folder / "a.jsonl"
    source.write_text('{"text": "1 2 3 4"}\n' * 500_000)
    (folder / "out").mkdir()
    words = ["--input", str(source), "--output-prefix", str(folder / "out" / "x"), *NULL, *flags]
    program = subprocess.Popen(
        [sys.executable, "-m", "tools.preprocess_data", *words, "--log-interval", "1"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stderr is not None
    while "documents" not in program.stderr.readline():
        assert program.poll() is None
    return program


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_leaves_no_file_and_no_process(tmp_path: Path, workers: str) -> None:
    with started_in_the_middle(tmp_path, "--workers", workers) as program:
        os.killpg(program.pid, signal.SIGINT)
        assert program.stderr is not None
        rest = program.stderr.read()  # to its end: until the last process of the group is gone
    assert program.returncode == 130
    assert "Traceback" not in rest
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kill_leaves_no_process_and_no_file_that_looks_finished(tmp_path: Path) -> None:
    with started_in_the_middle(tmp_path, "--workers", "2") as program:
        program.kill()
        assert program.stderr is not None
        program.stderr.read()
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert [name.endswith(".tmp") for name in left] == [True]


def test_a_full_disk_leaves_no_file_and_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3 4"] * 50_000)
    out = tmp_path / "out"
    out.mkdir()
    flags = ["-", "--input", str(source), "--output-prefix", str(out / "x"), *NULL]
    done = subprocess.run(
        # No file may grow beyond 100 KiB: the operating system refuses the rest.
        ["bash", "-c", f"ulimit -f 100; exec {sys.executable} -m tools.preprocess_data $*", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == MachineError.exit_code
    assert f"cannot write {out / 'x_text_document.bin'}" in done.stderr
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_disk_that_is_full_leaves_nothing_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3 4"] * 50_000)

    def refuse() -> None:
        def write(self: MMapIndexedDatasetBuilder, data: object) -> None:
            raise MachineError("cannot write", found="No space left on device", fix="make room")

        monkeypatch.setattr(MMapIndexedDatasetBuilder, "_write", write)

    with small_disk(tmp_path / "disk", kib=200, otherwise=refuse) as disk:
        with pytest.raises(MachineError, match="cannot write") as caught:
            preprocess(source, disk / "x", *NULL, "--workers", workers)
        assert "No space left on device" in str(caught.value)
        assert list(disk.iterdir()) == []


def test_packed_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    line = b'{"text": "%s"}\n'
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(line % b"two"))
    (folder / "1.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(line % b"one"))
    (folder / "3.txt").write_text("three\n<|endoftext|>\nfour\n")
    (folder / "notes.md").write_text("no corpus")
    preprocess(folder, tmp_path / "out", *BYTES)
    assert texts_of(tmp_path / "out") == ["one", "two", "three", "four"]


def test_several_keys_keep_their_rows_aligned(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    rows = [("q1", "a1"), ("", "a2"), ("q3", ""), ("q4", "a4")]
    source.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))
    preprocess(source, tmp_path / "out", *BYTES, "--json-keys", "q", "a")
    assert texts_of(tmp_path / "out", "q") == ["q1", "q4"]
    assert texts_of(tmp_path / "out", "a") == ["a1", "a4"]


def test_if_one_output_cannot_be_finished_none_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"q": "x", "a": "y"}\n')
    finalize = MMapIndexedDatasetBuilder.finalize

    def full_disk(self: MMapIndexedDatasetBuilder) -> None:
        if "_a_" in self.prefix:
            raise MachineError("no space left", fix="make room")
        finalize(self)

    monkeypatch.setattr(MMapIndexedDatasetBuilder, "finalize", full_disk)
    with pytest.raises(MachineError, match="no space left"):
        preprocess(source, tmp_path / "out" / "x", *BYTES, "--json-keys", "q", "a")
    assert list((tmp_path / "out").iterdir()) == []


def test_sentences_are_items_of_their_document(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["One. Two.\nThree.", " ", "Four."])
    preprocess(source, tmp_path / "out", *BYTES, "--split-sentences", "--append-eod")
    assert texts_of(tmp_path / "out", level="sentence") == [
        "One.", "Two.", "Three.<|endoftext|>", "Four.<|endoftext|>",
    ]  # fmt: skip
    dataset = MMapIndexedDataset(str(tmp_path / "out_text_sentence"))
    assert dataset.doc_idx.tolist() == [0, 3, 4]
    kept = tmp_path / "kept"
    preprocess(source, kept, *BYTES, "--split-sentences", "--keep-newlines")
    assert texts_of(kept, level="sentence") == ["One. ", "Two.\n", "Three.", "Four."]


def test_sentences_are_split_by_what_was_asked_for_and_the_sidecar_says_so(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["Dr. Smith came in Dec. They talked.\n"])
    model = str(write_model(tmp_path / "model"))
    punkt = ("--sentence-splitter", "nltk", "--nltk-data", model, "--lang", "english")
    recorded = {}
    for name, flags in (
        ("rules", ()),
        ("kept", ("--keep-newlines",)),
        ("nltk", punkt),
        ("nltk kept", (*punkt, "--keep-newlines", "--workers", "2")),
    ):
        preprocess(source, tmp_path / name, *BYTES, "--split-sentences", *flags)
        sidecar = json.loads((tmp_path / f"{name}_text_sentence.meta.json").read_text())
        recorded[name] = sidecar["sentence_splitter"]
    sentences = ["Dr. Smith came in Dec. They talked."]
    assert texts_of(tmp_path / "rules", level="sentence") == sentences
    sentences = ["Dr. Smith came in Dec.", "They talked."]
    assert texts_of(tmp_path / "nltk", level="sentence") == sentences
    sentences = ["Dr. Smith came in Dec. ", "They talked."]
    assert texts_of(tmp_path / "nltk kept", level="sentence") == sentences
    assert recorded["rules"] == "rules 1"
    assert recorded["kept"] == "rules 1, newlines kept"
    assert recorded["nltk"].startswith("nltk ")
    assert recorded["nltk kept"] == recorded["nltk"] + ", newlines kept"
    preprocess(source, tmp_path / "whole", *BYTES)
    sidecar = json.loads((tmp_path / "whole_text_document.meta.json").read_text())
    assert sidecar["sentence_splitter"] == ""


def test_the_token_type_follows_the_true_vocabulary(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2"])
    for size, dtype in (("1000", np.uint16), ("65499", np.int32)):
        flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", size)
        preprocess(source, tmp_path / size, *flags)
        assert MMapIndexedDataset(str(tmp_path / f"{size}_text_document")).dtype == dtype


def test_lost_text_is_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the dog zzz"])
    flags = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file")
    preprocess(source, tmp_path / "out", *flags, str(write_bert(tmp_path)))
    assert "1 of 3 tokens under 'text'" in capsys.readouterr().err


def test_an_existing_output_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["old"])
    preprocess(source, tmp_path / "out", *BYTES)
    write_jsonl(source, ["new"])
    with pytest.raises(ConfigError, match="the output exists") as caught:
        preprocess(source, tmp_path / "out", *BYTES)
    assert "out_text_document.idx" in str(caught.value)
    assert texts_of(tmp_path / "out") == ["old"]
    preprocess(source, tmp_path / "out", *BYTES, "--overwrite")
    assert texts_of(tmp_path / "out") == ["new"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--dataset-impl", "lazy"), "format 'lazy' is not written any more"),
        (("--workers", "0"), "--workers is a positive number"),
        (("--chunk-size", "0"), "--chunk-size is a positive number"),
        (("--keep-newlines",), "nothing is split"),
        (("--lang", "german"), "--lang affects how sentences are split, and nothing is split"),
        (("--nltk-data", "x"), "--nltk-data affects how sentences are split"),
        (("--sentence-splitter", "nltk"), "--sentence-splitter affects how sentences are split"),
        (("--split-sentences", "--lang", "german"), "--lang chooses a model of Punkt"),
        (("--json-keys", "text", "text"), "two outputs would have one name"),
    ],
)
def test_flags_that_cannot_be_kept_are_refused(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(ConfigError, match=problem):
        preprocess(source, tmp_path / "out" / "x", *BYTES, *flags)
    assert not (tmp_path / "out").exists()


def test_a_text_file_has_no_second_key(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a \.txt file has one text"):
        preprocess(tmp_path / "a.txt", tmp_path / "out", *BYTES, "--json-keys", "q", "a")


def test_input_without_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document is left") as caught:
        preprocess(write_jsonl(tmp_path / "a.jsonl", ["", ""]), tmp_path / "out" / "x", *BYTES)
    assert "2 empty documents in 1 files" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_document_end_that_does_not_exist_is_refused_before_any_work(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the dog"])
    flags = ("--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(write_bert(tmp_path)))
    with pytest.raises(ConfigError, match="--append-eod needs an end-of-document token"):
        preprocess(source, tmp_path / "out", *flags, "--append-eod")


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3"] * 40)
    preprocess(source, tmp_path / "out", *NULL, "--log-interval", "20", "--chunk-size", "10")
    lines = [line for line in capsys.readouterr().err.splitlines() if "documents" in line]
    assert [line.split(" | ")[:2] for line in lines] == [
        [" 50.0%", "20 documents"], ["100.0%", "40 documents"],
    ]  # fmt: skip
    assert "tokens/s" in lines[0]


@pytest.mark.parametrize("as_module", [False, True])
def test_the_program_says_what_is_wrong_and_exits_with_its_code(
    tmp_path: Path, as_module: bool
) -> None:
    command = [sys.executable, "-m", "tools.preprocess_data"]
    if not as_module:
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    source = write_jsonl(tmp_path / "a.jsonl", ["x"], key="body")
    command += ["--input", str(source), "--output-prefix", "out", *BYTES]
    folder = ROOT if as_module else tmp_path
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == DataError.exit_code
    assert without_times(done.stderr).startswith("ERROR: the line has no key 'text'")
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("out*"))


def test_the_program_works_with_workers_from_any_folder(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source)]
    command += ["--output-prefix", str(tmp_path / "out"), "--workers", "2", *BYTES]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert texts_of(tmp_path / "out") == ["x", "y"]


def test_the_time_per_document_is_small(tmp_path: Path) -> None:
    # 20,000 documents take 0.3 s on a laptop; a cost that grows with the square takes minutes.
    source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3"] * 20_000)
    started = time.perf_counter()
    preprocess(source, tmp_path / "out", *NULL)
    assert time.perf_counter() - started < 30


# Of the reference corpus, and of 50 short documents in a vocabulary of bytes and a few merges.
GOLDEN_HASHES = {
    ".bin": "bd6cae4cbc03040e8b86c834d4f03bea1e33aec1a6245a66c469b7f51fc82254",
    ".idx": "6c66639d39299e15605f39283e4b08849cf1ea4172c0abce900849a5762c8e5c",
}


SYNTHETIC_HASHES = {
    ".bin": "8e0bebe74c8b4006b9d2f6447ae27dfc366ba0be2bbe50a3f2db4f076312913b",
    ".idx": "fc2d5dc4e3e5f153eb93b2745a9123e12cfed1ba6e80bbeb2d38d03a5802ed08",
}
MERGES = ("t h", "th e", "\u0120 c", "a t", "\u0120c at")  # U+0120 stands for a space


def write_fixed_gpt2(folder: Path) -> None:
    """A vocabulary that no trainer has a part in, so that its ids are the same for ever."""
    folder.mkdir()
    pieces = [*sorted(byte_symbols()), *(merge.replace(" ", "") for merge in MERGES)]
    ids = {piece: number for number, piece in enumerate([*pieces, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))


def corpora(folder: Path) -> Iterator[tuple[Path, Path, dict[str, str]]]:
    """(prefix, folder of the tokenizer, hashes of the files): one of ours, and the golden one."""
    tokenizer = folder / "tokenizer"
    write_fixed_gpt2(tokenizer)
    source = write_jsonl(folder / "a.jsonl", [f"the {n} cats\n\n sat \u00e9" for n in range(50)])
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    flags += ["--vocab-file", str(tokenizer / "vocab.json")]
    preprocess(source, folder / "own", *flags, "--merge-file", str(tokenizer / "merges.txt"))
    own = folder / "own_text_document"
    yield own, tokenizer, SYNTHETIC_HASHES
    if (shared := optional_data_folder()) is not None:
        golden = shared / "megatron_mmap" / "meg-gpt2-openwebtext_text_document"
        yield golden, shared / "tokenizers" / "gpt2-tiny", GOLDEN_HASHES


def test_a_corpus_that_is_decoded_and_encoded_again_is_the_same_byte_for_byte(
    tmp_path: Path,
) -> None:
    for number, (prefix, folder, hashes) in enumerate(corpora(tmp_path)):
        files = {
            "vocab_file": str(folder / "vocab.json"),
            "merge_file": str(folder / "merges.txt"),
        }
        tokenizer = build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files)
        dataset = MMapIndexedDataset(str(prefix))
        assert all(dataset[index][-1] == tokenizer.eod for index in range(len(dataset)))
        texts = [tokenizer.detokenize(dataset[n].tolist()[:-1]) for n in range(len(dataset))]
        source = write_jsonl(tmp_path / f"again{number}.jsonl", texts)
        flags = [[f"--{key.replace('_', '-')}", value] for key, value in files.items()]
        again = tmp_path / f"again{number}"
        preprocess(
            source, again, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod",
            *itertools.chain(*flags),
        )  # fmt: skip
        for suffix, wanted in hashes.items():
            assert _sha256(Path(f"{again}_text_document{suffix}")) == wanted


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
