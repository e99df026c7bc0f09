"""Merging corpora: the bytes of the result, what is refused, and what a failure leaves behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.checksums import BLOCK_BYTES
from megatron.data.corpus.metadata import metadata_file_path, read_metadata
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import ConfigError, DataError, MachineError
from tests.support.checkpoints.small_disk import small_disk
from tests.support.launch import run_program, torchrun_words, unfinished
from tests.unit.tokenizer.test_punkt import write_model
from tests.unit.tokenizer.vocabularies import write_gpt2
from tools import merge_datasets, preprocess_data

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = str(ROOT / "tools" / "merge_datasets.py")
TEXTS = [f"document {n}. " * (n % 5) for n in range(40)]
LEVELS = {"document": (), "sentence": ("--split-sentences",)}


def corpus(folder: Path, name: str, texts: list[str], *flags: str) -> str:
    """Preprocess `texts` as bytes; returns the prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", str(source), "--output-prefix", str(folder / name)]
    if "--tokenizer-type" not in flags:
        words += ["--tokenizer-type", "ByteTokenizer"]
    preprocess_data.main([*words, *flags])
    level = "sentence" if "--split-sentences" in flags else "document"
    return str(folder / f"{name}_text_{level}")


def merge(inputs: list[str], output: Path, *flags: str) -> None:
    merge_datasets.main(["--input", *inputs, "--output-prefix", str(output), *flags])


def same_files(one: str | Path, two: str | Path) -> bool:
    return all(
        Path(f"{one}{suffix}").read_bytes() == Path(f"{two}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_merge_has_the_bytes_of_preprocessing_the_whole(tmp_path: Path, level: str) -> None:
    flags = ("--append-eod", *LEVELS[level])
    whole = corpus(tmp_path, "whole", TEXTS, *flags)
    cuts = [TEXTS[:1], TEXTS[1:13], TEXTS[13:]]
    cuts[0] = [*cuts[0], TEXTS[1]]  # the first text is empty, and an empty corpus is refused
    cuts[1] = cuts[1][1:]
    parts = [corpus(tmp_path, f"part{n}", texts, *flags) for n, texts in enumerate(cuts)]
    merge(parts, tmp_path / "merged")
    assert same_files(whole, tmp_path / "merged")
    one, two = read_metadata(whole), read_metadata(str(tmp_path / "merged"))
    assert one is not None
    assert two is not None
    for field in ("tokenizer_type", "vocab_size", "eod", "level", "num_items", "num_documents"):
        assert getattr(one, field) == getattr(two, field)


def test_a_folder_is_merged_in_sorted_order_and_megatrons_spelling_is_known(
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b", "a"):
        corpus(tmp_path / "in", name, [name])
    flags = ["--datasets", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "new" / "out")]
    merge_datasets.main([*flags, "--merge", "serial"])
    merged = MMapIndexedDataset(str(tmp_path / "new" / "out"))
    assert [bytes(item.tolist()) for item in merged] == [b"a", b"b"]


def test_progress_and_the_result_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [corpus(tmp_path, "a", ["one"]), corpus(tmp_path, "b", ["three"])]
    capsys.readouterr()
    merge([*parts, parts[0]], tmp_path / "out")
    printed = capsys.readouterr()
    assert f"2 of 3 | 10 bytes | {parts[1]}" in printed.out
    assert "merged 3 corpora into 3 documents, 3 items, 11 tokens" in printed.out
    assert f"--data-path {tmp_path / 'out'}" in printed.out
    assert f"{parts[0]} is merged 2 times over" in printed.err


def test_the_output_may_not_be_an_input_by_name_or_by_link(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, "a", ["x"])
    with pytest.raises(ConfigError, match="the output is one of the inputs"):
        merge([prefix], Path(prefix), "--overwrite")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{prefix}{suffix}")
    with pytest.raises(ConfigError, match="the output is one of the inputs"):
        merge([prefix], tmp_path / "link", "--overwrite")
    assert len(MMapIndexedDataset(prefix)) == 1


def test_an_existing_output_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, "a", ["x"])
    merge([prefix], tmp_path / "out")
    with pytest.raises(ConfigError, match="the output exists"):
        merge([prefix], tmp_path / "out")
    merge([prefix, prefix], tmp_path / "out", "--overwrite")
    assert len(MMapIndexedDataset(str(tmp_path / "out"))) == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--append-eod",), "differ in eod"),
        (("--split-sentences",), "differ in level"),
        (("--tokenizer-type", "NullTokenizer", "--vocab-size", "256"), "differ in tokenizer_type"),
        (("--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"), "different token types"),
    ],
)
def test_inputs_that_do_not_belong_together_are_both_named(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    parts = [corpus(tmp_path, "a", ["1 2"]), corpus(tmp_path, "b", ["1 2"], *flags)]
    with pytest.raises(DataError, match=problem) as caught:
        merge(parts, tmp_path / "out" / "x")
    assert all(part in str(caught.value) for part in parts)
    assert not (tmp_path / "out").exists()


def test_tokenizers_of_other_files_are_noticed(tmp_path: Path) -> None:
    parts = []
    for name, size in (("a", 290), ("b", 300)):
        files = write_gpt2(tmp_path / f"tokenizer{name}", size)
        flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files["vocab_file"]]
        parts.append(corpus(tmp_path, name, ["x"], *flags, "--merge-file", files["merge_file"]))
    for name in parts:
        path = Path(metadata_file_path(name))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 300}))
    with pytest.raises(DataError, match="differ in tokenizer_files") as caught:
        merge(parts, tmp_path / "out")
    assert all(part in str(caught.value) for part in parts)
    path = Path(metadata_file_path(parts[0]))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_files": {}}))
    merge(parts, tmp_path / "out")  # an older sidecar has no record


def test_inputs_without_a_sidecar_are_announced_and_the_output_gets_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [corpus(tmp_path, "a", ["x"]), corpus(tmp_path, "b", ["y"])]
    Path(metadata_file_path(parts[1])).unlink()
    merge(parts, tmp_path / "out")
    assert f"1 of 2 inputs have no sidecar (.meta.json), the first {parts[1]}" in (
        capsys.readouterr().err
    )
    written = MMapIndexedDataset(str(tmp_path / "out")).metadata
    assert written is None or written.tokenizer_type != "ByteTokenizer"


def test_different_keys_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = corpus(tmp_path, "a", ["x"])
    source = tmp_path / "b.jsonl"
    source.write_text('{"body": "y"}\n')
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "b"), "--json-keys", "body"]
    preprocess_data.main([*words, "--tokenizer-type", "ByteTokenizer"])
    merge([first, str(tmp_path / "b_body_document")], tmp_path / "out")
    assert "made from different JSON keys (body, text)" in capsys.readouterr().err


def test_a_damaged_or_missing_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    parts = [corpus(tmp_path, "a", ["one"]), corpus(tmp_path, "b", ["two"])]
    with pytest.raises(DataError, match="cannot be opened"):
        merge([*parts, str(tmp_path / "c")], tmp_path / "out" / "x")
    os.truncate(f"{parts[1]}.bin", 2)
    with pytest.raises(DataError, match="another length than its index says"):
        merge(parts, tmp_path / "out" / "x")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="the input folder holds no corpus"):
        merge([str(tmp_path)], tmp_path / "out")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_write_the_bytes_of_preprocessing_the_whole(tmp_path: Path, ranks: int) -> None:
    # Several blocks of checksums, cut elsewhere than the inputs are.
    texts = [f"document {n}. " * 900 * (1 + n % 5) for n in range(40)]
    whole = corpus(tmp_path, "whole", texts, "--append-eod")
    assert os.path.getsize(f"{whole}.bin") > 10 * BLOCK_BYTES
    cuts = {"a": texts[:1], "b": texts[1:31], "c": texts[31:]}
    parts = [corpus(tmp_path, name, cut, "--append-eod") for name, cut in cuts.items()]
    words = ["--input", *parts, "--output-prefix", str(tmp_path / "out" / "x")]
    words += ["--merge", "distributed"]
    if ranks == 1:
        merge_datasets.main(words)
    else:
        ended = run_program(
            torchrun_words(ranks, PROGRAM, *words), cwd=tmp_path, warm_children=True
        )
        assert ended.status == 0, ended.err
        assert f"--data-path {tmp_path / 'out' / 'x'}" in ended.out
    pairs = zip(corpus_files(whole), corpus_files(str(tmp_path / "out" / "x")))
    assert all(one.read_bytes() == two.read_bytes() for one, two in pairs)
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_a_damaged_input_ends_all_ranks_with_its_name(tmp_path: Path) -> None:
    parts = [corpus(tmp_path, name, [name * 400_000]) for name in ("a", "b")]
    with open(f"{parts[1]}.bin", "r+b") as file:
        file.seek(700_000)
        file.write(b"x")
    words = ["--input", *parts, "--output-prefix", str(tmp_path / "out" / "x")]
    words += ["--merge", "distributed"]
    ended = run_program(torchrun_words(2, PROGRAM, *words), cwd=tmp_path, warm_children=True)
    assert ended.status != 0
    assert f"the tokens are not those that were written: {parts[1]}.bin" in ended.err
    assert not list((tmp_path / "out").glob("*[!p]"))  # what is there ends in .tmp


def test_a_merge_by_one_process_is_not_started_by_torchrun(tmp_path: Path) -> None:
    part = corpus(tmp_path, "a", ["x"])
    words = ["--input", part, "--output-prefix", str(tmp_path / "out")]
    ended = run_program(torchrun_words(2, PROGRAM, *words), cwd=tmp_path, warm_children=True)
    assert ended.status != 0
    assert "several ranks were started for a merge by one process" in ended.err
    assert not list(tmp_path.glob("out*"))


def test_splitters_of_sentences_are_recorded_and_a_mix_is_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "model"))
    punkt = ("--sentence-splitter", "nltk", "--nltk-data", model)
    parts = [
        corpus(tmp_path, name, ["One. Two."], "--split-sentences", *flags)
        for name, flags in (("a", ()), ("b", punkt))
    ]
    merge(parts, tmp_path / "out")
    assert "split into sentences in different ways: nltk " in capsys.readouterr().err
    metadata = read_metadata(str(tmp_path / "out"))
    assert metadata is not None
    assert metadata.sentence_splitter.endswith("; rules 1")
    assert metadata.sentence_splitter.startswith("nltk ")


@pytest.mark.parametrize("method", ["serial", "distributed"])
@pytest.mark.parametrize("says_room", [False, True])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, says_room: bool
) -> None:
    """Test that a full disk is found before, or only by writing to it."""
    part = corpus(tmp_path, "a", ["x" * 300_000])
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse() -> None:
        def pwrite(descriptor: int, data: object, at: int) -> int:
            raise full

        def add(self: MMapIndexedDatasetBuilder, data: object) -> None:
            raise MachineError("cannot write", found=str(full), fix="make room")

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(MMapIndexedDatasetBuilder, "_write", add)

    usage = namedtuple("usage", "total used free")  # shutil's own shape
    room = usage(1 << 40, 0, 1 << 40 if says_room else 10)
    with small_disk(tmp_path / "disk", kib=1000, otherwise=refuse) as disk:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
        problem = "cannot write" if says_room else "no room for the merged corpus"
        with pytest.raises(MachineError, match=problem):
            merge([part] * 3, disk / "x", "--merge", method)
        assert list(disk.iterdir()) == []


def test_a_disk_without_room_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = corpus(tmp_path, "a", ["x" * 100])
    usage = namedtuple("usage", "total used free")  # shutil's own shape
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(MachineError, match="no room for the merged corpus") as caught:
        merge([prefix], tmp_path / "out" / "x")
    assert "100 bytes free" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_merge_that_is_broken_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    parts = [corpus(tmp_path, "a", ["one"]), corpus(tmp_path, "b", ["two"])]
    merge_one = MMapIndexedDatasetBuilder.merge_file_

    def breaks(self: MMapIndexedDatasetBuilder, prefix: str) -> None:
        merge_one(self, prefix)
        if prefix == parts[1]:
            raise failure

    monkeypatch.setattr(MMapIndexedDatasetBuilder, "merge_file_", breaks)
    with pytest.raises(type(failure)):
        merge(parts, tmp_path / "out" / "x")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "disk"), KeyboardInterrupt()])
def test_a_distributed_merge_that_is_broken_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    part = corpus(tmp_path, "a", ["one"])

    def breaks(descriptor: int, data: object, at: int) -> int:
        raise failure

    monkeypatch.setattr(os, "pwrite", breaks)
    expected = MachineError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        merge([part], tmp_path / "out" / "x", "--merge", "distributed")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("method", ["serial", "distributed"])
def test_the_program_that_is_killed_leaves_no_file_that_looks_finished(
    tmp_path: Path, method: str
) -> None:
    tokens = np.zeros(1 << 22, np.int32)
    with MMapIndexedDatasetBuilder(str(tmp_path / "big")) as builder:
        builder.add_document(tokens)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "tools.merge_datasets", "--output-prefix", str(out / "x")]
    command += ["--merge", method, "--input", *[str(tmp_path / "big")] * 40]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as program:
        deadline = time.monotonic() + 60
        while not list(out.iterdir()) and program.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        program.send_signal(signal.SIGKILL)
    assert [path.name for path in out.iterdir()] == [
        name.rpartition("/")[2] for name in unfinished(out)
    ]
