"""Text to the .bin/.idx corpus that training reads: tokenized in many processes, order kept.

A row is kept under every key of --json-keys or dropped under every key, so that the outputs of one
run stay aligned row by row. Nothing appears under its final name before everything has been
tokenized. The work between text and ids is in `tools.encoding`, the file formats are
`megatron.data.indexed_dataset`'s.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from megatron import log
from megatron.data.corpus_metadata import digests_of_files
from megatron.data.corpus_paths import corpus_files
from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.errors import ConfigError, DataError
from megatron.program import run
from megatron.tokenizer.tokenizer import (
    Tokenizer,
    require_eod,
)
from tools import resume
from tools.corpus_output import CorpusSet, Totals
from tools.documents import TEXT_RULES, InputFiles, TextRule, find_inputs, is_text
from tools.encoders import ENCODERS, choose_encoder
from tools.encoding import (
    Chunk,
    EncodedChunk,
    EncodeSettings,
    encode_chunk,
    encode_in_order,
    read_chunks,
    texts_of_rows,
)
from tools.resume import Journal, Part
from tools.tokenizer_flags import add_tokenizer_flags, tokenizer_spec

_COMPARED_CHARACTERS = 20_000  # of each of the first documents, when encoders are compared
_SECONDS_BETWEEN_LINES = 5.0  # of progress, where standard error is no terminal


class Job(NamedTuple):
    """What one run does, checked: nothing in its flags can go wrong any more."""

    settings: EncodeSettings
    tokenizer: Tokenizer
    prefixes: list[str]  # of the outputs, one per key
    inputs: InputFiles
    rule: TextRule
    chunk_size: int
    workers: int
    log_interval: int | None

    def chunks(self) -> Iterator[Chunk]:
        """The input, as it is handed to the encoders; the same each time."""
        return read_chunks(
            self.inputs.files, self.rule, chunk_size=self.chunk_size, columns=self.settings.keys
        )

    def encoded(self, chunks: Iterator[Chunk]) -> Iterator[EncodedChunk]:
        """The chunks as ids, in order; to be closed when it is left early."""
        encode = functools.partial(encode_chunk, self.settings)
        return encode_in_order(chunks, encode, workers=self.workers)


def main(argv: list[str] | None = None) -> None:
    """Read, tokenize, write, and say what was written; raises MegatronError."""
    args = parser().parse_args(argv)
    job = prepare(args)
    started = time.perf_counter()
    totals = _write_in_parts(job, args.output_prefix) if args.resume else _write(job)
    print_summary(job, totals, time.perf_counter() - started)


def prepare(args: argparse.Namespace) -> Job:
    """Check the flags, read the tokenizer and list the input; nothing has been written then."""
    _check_flags(args)
    settings = EncodeSettings(
        tokenizer=tokenizer_spec(args),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        skip_bad_lines=args.on_bad_line == "skip",
    )
    tokenizer = settings.tokenizer.build()  # every mistake in its flags shows before any work
    if args.append_eod:
        require_eod(tokenizer, "--append-eod")
    prefixes = _output_prefixes(args)
    inputs = _inputs(args, settings)
    rule = TextRule(args.text_documents, args.document_separator)
    encoder = choose_encoder(args.encoder, tokenizer, _first_texts(inputs, rule, settings))
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    return Job(
        settings=replace(settings, encoder=encoder),
        tokenizer=tokenizer,
        prefixes=prefixes,
        inputs=inputs,
        rule=rule,
        chunk_size=args.chunk_size,
        workers=args.workers,
        log_interval=args.log_interval,
    )


def require_documents(job: Job, totals: Totals) -> None:
    """Refuse an output that would hold nothing."""
    if not totals.documents:
        raise DataError(
            "no document is left, so there is nothing to write",
            found=f"{totals.dropped} empty documents in {len(job.inputs.files)} files"
            + (f", {totals.bad} bad lines: {totals.bad_examples[0]}" if totals.bad else ""),
            fix="check --input and --json-keys",
        )


def _first_texts(inputs: InputFiles, rule: TextRule, settings: EncodeSettings) -> list[str]:
    """Text enough to compare two encoders on, and not so much that one waits for it."""
    chunk = next(read_chunks(inputs.files, rule, columns=settings.keys))
    return [text[:_COMPARED_CHARACTERS] for text in texts_of_rows(settings, chunk)]


def _write(job: Job) -> Totals:
    """Everything in one go: all outputs, or nothing."""
    with (
        contextlib.closing(job.encoded(job.chunks())) as encoded,  # type: ignore[type-var]
        CorpusSet(job.prefixes, job.settings, job.tokenizer) as corpora,
        Progress(job) as progress,
    ):
        for chunk in encoded:
            corpora.append(chunk)
            progress.show(corpora.totals, chunk.disk_bytes)
        require_documents(job, corpora.totals)
        corpora.finish()
    return corpora.totals


def _write_in_parts(job: Job, output_prefix: str) -> Totals:
    """Part after part, from where an earlier run of the same flags was broken off."""
    keys = len(job.prefixes)
    journal = Journal(output_prefix, _fingerprint(job))
    totals = Totals.zero(keys)
    for part in journal.parts:
        totals.include(part.totals)
    if journal.parts:
        log.info(f"going on behind {totals.documents} documents in {len(journal.parts)} parts")
    chunks = job.chunks()
    done = sum(chunk.disk_bytes for chunk in islice(chunks, journal.chunks))
    with (
        contextlib.closing(job.encoded(chunks)) as encoded,  # type: ignore[type-var]
        Progress(job, done) as progress,
    ):
        while (first := next(encoded, None)) is not None:
            prefixes = journal.prefixes(len(journal.parts), keys)
            with CorpusSet(prefixes, job.settings, job.tokenizer) as corpora:
                count = 0
                for chunk in _of_one_part(first, encoded):
                    corpora.append(chunk)
                    totals.add(chunk)
                    progress.show(totals, chunk.disk_bytes)
                    count += 1
                corpora.finish()
            journal.add(Part(count, corpora.totals))
    require_documents(job, totals)
    with CorpusSet(job.prefixes, job.settings, job.tokenizer) as corpora:
        corpora.merge(journal.written(keys))
        corpora.finish()
    journal.remove()
    return totals


def _of_one_part(first: EncodedChunk, rest: Iterator[EncodedChunk]) -> Iterator[EncodedChunk]:
    size = 0
    for chunk in chain([first], rest):
        yield chunk
        size += chunk.disk_bytes
        if size >= resume.PART_BYTES:
            return


def _fingerprint(job: Job) -> str:
    """Everything that decides which bytes are written; not the encoder, for all give the same."""
    settings = replace(job.settings, encoder="")
    files = [(str(path.resolve()), path.stat()) for path in job.inputs.files]
    content = {
        "settings": repr(settings),
        "rule": repr(job.rule),
        "chunk_size": job.chunk_size,
        "tokenizer": digests_of_files(settings.tokenizer.files()),
        "input": [(name, status.st_size, status.st_mtime_ns) for name, status in files],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Progress:
    """A bar on a terminal, a line now and then anywhere else; always on standard error."""

    def __init__(self, job: Job, done: int = 0) -> None:
        self._size = sum(path.stat().st_size for path in job.inputs.files)
        self._done = done
        self._log_interval = job.log_interval
        self._started = self._last_time = time.perf_counter()
        self._last_documents = 0
        self._bar = tqdm(
            total=self._size,
            initial=done,
            unit="B",
            unit_scale=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, totals: Totals, disk_bytes: int) -> None:
        """Take note of one more chunk, and show the state of things if it is time."""
        self._done += disk_bytes
        now = time.perf_counter()
        if not self._bar.disable:
            self._bar.set_postfix_str(_rates(totals, now - self._started), refresh=False)
            self._bar.update(disk_bytes)
        elif self._is_time(totals.documents, now):
            percent = 100 * self._done / max(1, self._size)
            rates = _rates(totals, now - self._started)
            print(f"{percent:5.1f}% | {totals.documents} documents | {rates}", file=sys.stderr)
            self._last_time, self._last_documents = now, totals.documents

    def _is_time(self, documents: int, now: float) -> bool:
        if self._log_interval is None:
            return now - self._last_time >= _SECONDS_BETWEEN_LINES
        return documents // self._log_interval > self._last_documents // self._log_interval


def _rates(totals: Totals, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    tokens = sum(totals.tokens) / seconds
    return f"{totals.text_bytes / seconds / 1e6:.2f} MB/s, {tokens:,.0f} tokens/s"


def print_summary(job: Job, totals: Totals, seconds: float) -> None:
    """Say what was written, what was left out, and how training finds it."""
    settings, tokenizer = job.settings, job.tokenizer
    dtype = np.dtype(best_fitting_dtype(tokenizer.vocab_size))
    print(f"{'key':<16}{'documents':>12}{'items':>12}{'tokens':>16}{'.bin bytes':>16}")
    for key, items, tokens in zip(settings.keys, totals.items, totals.tokens):
        print(
            f"{key:<16}{totals.documents:>12}{items:>12}{tokens:>16}{tokens * dtype.itemsize:>16}"
        )
    print(
        f"read {totals.text_bytes / 1e6:.1f} MB in {seconds:.1f} s ({_rates(totals, seconds)}), "
        f"vocabulary {tokenizer.vocab_size}, {dtype.name}, encoder {settings.encoder}"
    )
    if totals.dropped:
        print(f"dropped {totals.dropped} documents that were empty under at least one key")
    if totals.bad:
        more = totals.bad - len(totals.bad_examples)
        listed = "".join(f"\n  {example}" for example in totals.bad_examples)
        log.warning(
            f"skipped {totals.bad} bad lines:{listed}" + (f"\n  and {more} more" if more else "")
        )
    for key, unknown, tokens in zip(settings.keys, totals.unknown, totals.tokens):
        if unknown:
            log.warning(
                f"{unknown} of {tokens} tokens under {key!r} ({unknown / tokens:.4%}) are the "
                "unknown piece: that text is lost to the model"
            )
    for prefix in job.prefixes:
        print(f"--data-path {prefix}")


def parser(prog: str = "preprocess_data.py") -> argparse.ArgumentParser:
    """The flags of preprocessing."""
    flags = argparse.ArgumentParser(
        prog=prog, description="Tokenize text into .bin/.idx files for training."
    )
    _add_input_flags(flags.add_argument_group("input"))
    _add_tokenizer_flags(flags.add_argument_group("tokenizer"))
    _add_output_flags(flags.add_argument_group("output"))
    return flags


def _check_flags(args: argparse.Namespace) -> None:
    if args.dataset_impl != "mmap":
        raise ConfigError(
            f"the dataset format {args.dataset_impl!r} is not written any more",
            found=f"--dataset-impl {args.dataset_impl}",
            fix="use --dataset-impl mmap, or leave it out",
        )
    for flag in ("workers", "chunk_size", "log_interval"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is a positive number",
                found=f"--{flag.replace('_', '-')} {value}",
                fix="use 1 or more, or leave it out",
            )
    if args.keep_newlines and not args.split_sentences:
        raise ConfigError(
            "--keep-newlines says how sentences are split, and nothing is split",
            found="--keep-newlines without --split-sentences",
            fix="add --split-sentences, or leave --keep-newlines out (documents keep everything)",
        )


def _add_input_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .json or .txt files (also .gz, .zst), .parquet files, or folders of them",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the text in each JSON line; each gets an output of its own [text]",
    )
    add(
        "--text-documents",
        choices=TEXT_RULES,
        default="separator",
        help="what is one document of a .txt: what stands between separator lines, the whole "
        "file, each line, or each paragraph [separator]",
    )
    add(
        "--document-separator",
        default="<|endoftext|>",
        metavar="LINE",
        help="the line between two documents of a .txt; without it the file is one [<|endoftext|>]",
    )
    add(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="a line that is no JSON, no UTF-8 or has no text under a key: stop, or leave it out "
        "and count it [error]",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="make each sentence an item (for BERT), by rules for punctuation",
    )
    add(
        "--keep-newlines",
        action="store_true",
        help="with --split-sentences: keep the white space between sentences",
    )


def _add_tokenizer_flags(group: "argparse._ArgumentGroup") -> None:
    add_tokenizer_flags(group)
    add = group.add_argument
    add(
        "--encoder",
        choices=ENCODERS,
        default="auto",
        help="what encodes for GPT2BPETokenizer: the fastest that is installed and gives the "
        "tokenizer's own ids, or one by name [auto]",
    )
    add("--append-eod", action="store_true", help="end each document with the tokenizer's token")


def _add_output_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with sentences)",
    )
    add("--dataset-impl", default="mmap", metavar="mmap", help="the only format there is [mmap]")
    add("--overwrite", action="store_true", help="replace outputs that exist")
    add(
        "--resume",
        action="store_true",
        help="write in parts, and go on behind those that an earlier run left in PREFIX.partial; "
        "takes twice the space on disk for a moment",
    )
    add("--workers", type=int, default=1, help="processes that tokenize; 1: no other process [1]")
    add("--chunk-size", type=int, default=25, help="documents sent to a worker at a time [25]")
    add(
        "--log-interval",
        type=int,
        metavar="DOCUMENTS",
        help="documents between lines of progress; without it a line every 5 seconds",
    )


def _inputs(args: argparse.Namespace, settings: EncodeSettings) -> InputFiles:
    inputs = find_inputs(args.input)
    for path in inputs.files:
        if is_text(path) and len(settings.keys) > 1:
            raise ConfigError(
                "a .txt file has one text for each document, and several keys are asked for",
                found=f"{path} with --json-keys {' '.join(settings.keys)}",
                fix="name one key, or write the rows as .jsonl",
            )
    if inputs.passed_over:
        log.warning(
            f"passed over {len(inputs.passed_over)} files that are no text by their names, "
            f"the first {inputs.passed_over[0]}"
        )
    return inputs


def _output_prefixes(args: argparse.Namespace) -> list[str]:
    level = "sentence" if args.split_sentences else "document"
    prefixes = [f"{args.output_prefix}_{key}_{level}" for key in args.json_keys]
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError(
            "two outputs would have one name",
            found=f"--json-keys {' '.join(args.json_keys)}",
            fix="name each key once",
        )
    for prefix in prefixes:
        for path in corpus_files(prefix):
            if path.exists() and not args.overwrite:
                raise ConfigError(
                    "the output exists",
                    found=str(path),
                    fix="add --overwrite to replace it, or choose another --output-prefix",
                )
    return prefixes


if __name__ == "__main__":
    run(main)
