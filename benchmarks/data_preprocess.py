"""The section of `data.py` that turns text into corpora.

What a reader would get wrong: a tool's seconds are those of its whole process tree, its start
included, so on little text the start is most of it. Net of the start means less the seconds of
the same command on one document.
"""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.data_sections import NO_PEER, PEER, PEERS, Setting, in_fresh
from benchmarks.data_turns import (
    Row,
    Section,
    Target,
    Turn,
    ratio,
    require_equal,
    row_of,
    take_turns,
)
from benchmarks.data_worker import Answer, Worker, WorkerError
from megatron.tokenizer.tokenizer import TokenizerSpec
from tools import make_corpus, train_tokenizer
from tools.preprocessing.documents import TextRule, is_text, texts

_TOOL = Path(__file__).resolve().parents[1] / "tools" / "preprocess_data.py"
_ENCODERS = ("gigatoken", "tiktoken", "tokenizers")
_TRAINED_PIECES = 8192
_DOCUMENT_CHARACTERS = 4000  # paragraphs of a .txt are joined up to this length
_BATCH = 1000  # documents that the bare libraries get at a time
_MB = "MB"


class Material(NamedTuple):
    """The text to preprocess, and the tokenizer files."""

    documents: Path  # JSON lines
    one_document: Path
    megabytes: float  # of text, as UTF-8
    vocab_file: Path
    merge_file: Path
    tokenizer_json: Path

    @property
    def gpt2_flags(self) -> list[str]:
        """Return the flags of GPT2BPETokenizer."""
        files = ("--vocab-file", str(self.vocab_file), "--merge-file", str(self.merge_file))
        return ["--tokenizer-type", "GPT2BPETokenizer", *files]

    @property
    def json_flags(self) -> list[str]:
        """Return the flags of a tokenizer.json."""
        path = str(self.tokenizer_json)
        return ["--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path", path]


def preprocess(setting: Setting) -> Section:
    """Measure text to .bin/.idx with every installed encoder, the peer and the libraries."""
    material = _material(setting)
    section = Section(
        "preprocess",
        f"{material.megabytes:.1f} MB of text, {setting.flags.workers} workers; seconds of the "
        "whole process tree",
    )
    _tools(setting, material, section)
    _one_process(setting, material, section)
    return section


def _tools(setting: Setting, material: Material, section: Section) -> None:
    """Measure whole programs, each in its own process tree."""
    encoders = ["auto", *(name for name in _ENCODERS if importlib.util.find_spec(name))]
    section.notes += [f"{name} is not installed" for name in _ENCODERS if name not in encoders]
    commands = {
        f"ours, {name}": partial(_our_command, setting, material, name) for name in encoders
    }
    if setting.flags.peer_python is None:
        section.notes.append(NO_PEER)
    else:
        commands[PEER] = partial(_peer_command, setting, material)
        section.notes.append(
            "megatron-core's pip package has no tools/preprocess_data.py: its own HuggingFace "
            "tokenizer class and IndexedDatasetBuilder are driven as that tool drives them"
        )
    turns: dict[str, Turn] = {}
    starts: dict[str, Turn] = {}
    for who, command in commands.items():
        name = who.replace(", ", "-")
        turns[who] = partial(_run, command(material.documents, setting.folder / name))
        starts[who] = partial(_run, command(material.one_document, setting.folder / f"{name}-1"))
    rows = take_turns(
        turns, repeats=setting.flags.repeats, amount=material.megabytes, unit=_MB, fresh=True
    )
    empty = take_turns(starts, repeats=setting.flags.repeats, amount=0, unit=_MB)
    _compare_outputs(setting, list(commands), section)
    section.rows += [*rows, *(_net(row, start) for row, start in zip(rows, empty))]
    for row in rows:
        if (served := row.turns[0].get("encoder")) and row.who == "ours, auto":
            section.notes.append(f"auto chose {served}")
    found = _quotient(section, f"{PEER}, net of start", "ours, auto, net of start")
    section.targets.append(Target(f"{PEER} / ours, auto, net of start, in CPU s", found, 4.0))
    found = ratio(row_of(rows, PEER), row_of(rows, "ours, auto"))
    section.notes += [] if found is None else [f"the same with the start: {found:.2f}"]


def _one_process(setting: Setting, material: Material, section: Section) -> None:
    """Measure the tool and the libraries after imports, each turn in a new process."""
    documents = str(material.documents)
    words = ["--input", documents, "--append-eod", "--overwrite"]
    words += ["--output-prefix", str(setting.folder / "one-process")]
    name, bare = "ours, tokenizer.json, imports done", "bare tokenizers.encode_batch"
    jobs: dict[str, tuple[str, dict[str, object]]] = {
        name: ("tool", {"words": [*words, *material.json_flags]}),
        bare: (
            "bare_tokenizers",
            {"path": str(material.tokenizer_json), "documents": documents, "batch": _BATCH},
        ),
    }
    if importlib.util.find_spec("tiktoken"):
        files = {"vocab_file": str(material.vocab_file), "merge_file": str(material.merge_file)}
        jobs["ours, tiktoken, imports done"] = (
            "tool",
            {"words": [*words, *material.gpt2_flags, "--encoder", "tiktoken"]},
        )
        jobs["bare tiktoken"] = ("bare_tiktoken", {"documents": documents, **files})
    rows = take_turns(
        {
            who: in_fresh(setting.ours, partial(_send_job, job, arguments))
            for who, (job, arguments) in jobs.items()
        },
        repeats=setting.flags.repeats,
        amount=material.megabytes,
        unit=_MB,
    )
    section.rows += rows
    found = ratio(row_of(rows, bare), row_of(rows, name))
    section.targets.append(
        Target("ours with tokenizer.json / bare tokenizers, MB per CPU s", found, at_least=0.95)
    )


def _send_job(job: str, arguments: dict[str, object], worker: Worker) -> Answer:
    return worker.ask(job, **arguments)


def _our_command(
    setting: Setting, material: Material, encoder: str, documents: Path, prefix: Path
) -> list[str]:
    words = [sys.executable, "-E", str(_TOOL), "--input", str(documents), *material.gpt2_flags]
    words += ["--encoder", encoder, "--append-eod", "--overwrite", "--output-prefix", str(prefix)]
    return [*words, "--workers", str(setting.flags.workers)]


def _peer_command(setting: Setting, material: Material, documents: Path, prefix: Path) -> list[str]:
    folder = setting.folder / "peer-tokenizer"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(material.vocab_file, folder / "vocab.json")
    shutil.copyfile(material.merge_file, folder / "merges.txt")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}\n')
    words = [str(setting.flags.peer_python), "-E", "-W", "ignore", str(PEERS), "preprocess"]
    words += ["--tokenizer", str(folder), "--input", str(documents)]
    words += ["--output-prefix", f"{prefix}_text_document"]
    return [*words, "--workers", str(setting.flags.workers)]


def _run(command: list[str]) -> Answer:
    """Return seconds and peak memory of a process and its children."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101  # invariant: a pipe
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        raise WorkerError(f"exit status {process.returncode}: {' '.join(command)}")
    _, found, encoder = output.partition(", encoder ")
    return {
        "wall": wall,
        "cpu": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1024,
        "encoder": encoder.split()[0] if found else None,
    }


def _net(row: Row, start: Row) -> Row:
    net = Row(f"{row.who}, net of start", row.amount, row.unit)
    for key in ("cpu", "wall"):
        found = median(a[key] - b[key] for a, b in zip(row.turns, start.turns))
        setattr(net, key, max(found, 1e-9))
    return net


def _quotient(section: Section, one: str, other: str) -> float | None:
    rows = row_of(section.rows, one), row_of(section.rows, other)
    return None if rows[0] is None or rows[1] is None else rows[0].cpu / rows[1].cpu


def _compare_outputs(setting: Setting, contestants: list[str], section: Section) -> None:
    files = [setting.folder / f"{who.replace(', ', '-')}_text_document" for who in contestants]
    first = files[0].with_suffix(".bin").read_bytes()
    for who, path in zip(contestants[1:], files[1:]):
        same = path.with_suffix(".bin").read_bytes() == first
        require_equal(f"the .bin of {who}", "same", "same" if same else "other")
    index = [path.with_suffix(".idx").read_bytes() for path in files]
    indices = "so has every .idx" if len(set(index)) == 1 else "the .idx differ"
    section.notes.append(f"every .bin has the same bytes, {indices}")


def _material(setting: Setting) -> Material:
    flags, folder = setting.flags, setting.folder
    documents, one = folder / "documents.jsonl", folder / "one-document.jsonl"
    sources = flags.text
    if sources is None:
        sources = [folder / "python.jsonl"]
        with redirect_stdout(sys.stderr):
            make_corpus.main(
                ["--output", str(sources[0]), "--overwrite", "--max-mb", str(flags.megabytes)]
            )
    size = 0
    with documents.open("w", encoding="utf-8") as file:
        for number, text in enumerate(_documents(sources)):
            size += len(text.encode())
            line = json.dumps({"text": text}) + "\n"
            file.write(line)
            if number == 0:
                one.write_text(line, encoding="utf-8")
            if size >= flags.megabytes * 1e6:
                break
    vocab_file, merge_file = flags.vocab_file, flags.merge_file
    if vocab_file is None:
        trained = folder / "tokenizer"
        words = ["--input", str(documents), "--output", str(trained), "--overwrite"]
        with redirect_stdout(sys.stderr):
            train_tokenizer.main([*words, "--vocab-size", str(_TRAINED_PIECES)])
        vocab_file, merge_file = trained / "vocab.json", trained / "merges.txt"
    tokenizer_json = flags.tokenizer_json
    if tokenizer_json is None:
        built = TokenizerSpec(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(vocab_file),
            merge_file=str(merge_file),
        ).build()
        tokenizer_json = folder / "tokenizer.json"
        built.core.save(str(tokenizer_json))  # type: ignore[attr-defined]
    return Material(documents, one, size / 1e6, vocab_file, merge_file, tokenizer_json)


def _documents(sources: list[Path]) -> Iterator[str]:
    """Yield the documents of the files; .txt paragraphs are joined to a few KB each."""
    for path in sources:
        found = (text for _, text in texts([path], "text", TextRule("paragraphs")))
        if not is_text(path):
            yield from (text for text in found if text)
            continue
        parts: list[str] = []
        for text in itertools.chain(found, [None]):
            if text is None or sum(map(len, parts)) + len(text) > _DOCUMENT_CHARACTERS:
                if parts:
                    yield "\n\n".join(parts)
                parts = []
            if text is not None:
                parts.append(text)
