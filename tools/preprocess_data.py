"""Text to the .bin/.idx corpus that training reads: tokenized in many processes, order kept.

A row is kept under every key of --json-keys or dropped under every key, so that the outputs of one
run stay aligned row by row. Nothing appears under its final name before everything has been
tokenized. The work between text and ids is in `tools.preprocessing.encoding`, the file formats are
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
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from megatron import log
from megatron.data.corpus.metadata import ItemLevel, digests_of_files
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.errors import ConfigError, DataError
from megatron.program import run_program
from megatron.tokenizer.splitters import SPLITTERS, Splitter, choose_splitter
from megatron.tokenizer.tokenizer import (
    Tokenizer,
    require_eod,
)
from tools.flags.tokenizer import add_tokenizer_flags, tokenizer_spec
from tools.preprocessing import resume
from tools.preprocessing.corpus_output import CorpusSet, Totals
from tools.preprocessing.dataset_rows import DatasetName, open_dataset
from tools.preprocessing.documents import TEXT_RULES, TextRule, find_inputs, is_text
from tools.preprocessing.encoders import ENCODERS, choose_encoder
from tools.preprocessing.encoding import (
    Chunk,
    EncodedChunk,
    EncodeSettings,
    encode_chunk,
    encode_in_order,
    encoder_of,
    texts_of_rows,
    worker_tokenizer,
)
from tools.preprocessing.resume import CorpusPart, Journal
from tools.preprocessing.sources import FileSource, Source

_COMPARED_ROWS = 25
_COMPARED_CHARACTERS = 20_000  # of each of the first documents, when encoders are compared
_BY_RULES = SPLITTERS[0]
_SECONDS_BETWEEN_LINES = 5.0  # of progress, where standard error is no terminal


class PreprocessingJob(NamedTuple):
    """The work of one run, with all flags checked."""

    settings: EncodeSettings
    tokenizer: Tokenizer
    prefixes: list[str]  # of the outputs, one per key
    source: Source
    chunk_size: int
    workers: int
    log_interval: int | None

    def chunks(self) -> Iterator[Chunk]:
        """Return the input as chunks for the encoders; the same each time."""
        return self.source.chunks(self.chunk_size)

    def encoded(self, chunks: Iterator[Chunk]) -> Iterator[EncodedChunk]:
        """Return the chunks as ids, in order; close the iterator when it is left early."""
        encode = functools.partial(encode_chunk, self.settings)
        return encode_in_order(chunks, encode, workers=self.workers)


def main(argv: list[str] | None = None) -> None:
    """Read, tokenize, write, and print what was written; raises MegatronError."""
    args = preprocessing_parser().parse_args(argv)
    job = prepare_job(args)
    started = time.perf_counter()
    totals = _write_in_parts(job, args.output_prefix) if args.resume else _write(job)
    print_summary(job, totals, time.perf_counter() - started)


def prepare_job(args: argparse.Namespace) -> PreprocessingJob:
    """Check the flags, read the tokenizer and list the input; writes nothing."""
    _check_flags(args)
    settings = EncodeSettings(
        tokenizer=tokenizer_spec(args),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        splitter=choose_splitter(args.sentence_splitter, args.lang, args.nltk_data)
        if args.split_sentences
        else Splitter(),
        keep_newlines=args.keep_newlines,
        skip_bad_lines=args.on_bad_line == "skip",
    )
    # Every mistake in the tokenizer's flags shows before any work.
    tokenizer = worker_tokenizer(settings.tokenizer)
    if args.append_eod:
        require_eod(tokenizer, "--append-eod")
    prefixes = _output_prefixes(args)
    source = _source(args, settings)
    build = functools.partial(encoder_of, settings.tokenizer)  # it will be needed again
    encoder = choose_encoder(args.encoder, tokenizer, _first_texts(source, settings), build=build)
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    return PreprocessingJob(
        settings=replace(settings, encoder=encoder),
        tokenizer=tokenizer,
        prefixes=prefixes,
        source=source,
        chunk_size=args.chunk_size,
        workers=args.workers,
        log_interval=args.log_interval,
    )


def require_documents(job: PreprocessingJob, totals: Totals) -> None:
    """Refuse an output without documents."""
    if not totals.documents:
        raise DataError(
            "no document is left, so there is nothing to write",
            found=f"{totals.dropped} empty documents in {job.source}"
            + (f", {totals.bad} bad lines: {totals.bad_examples[0]}" if totals.bad else ""),
            fix="check --input and --json-keys",
        )


def _first_texts(source: Source, settings: EncodeSettings) -> list[str]:
    """Return enough text to compare two encoders quickly."""
    chunk = next(source.chunks(_COMPARED_ROWS))
    return [text[:_COMPARED_CHARACTERS] for text in texts_of_rows(settings, chunk)]


def _write(job: PreprocessingJob) -> Totals:
    """Write all outputs in one pass, or none of them."""
    with (
        contextlib.closing(job.encoded(job.chunks())) as encoded,  # type: ignore[type-var]
        CorpusSet(job.prefixes, job.settings, job.tokenizer) as corpora,
        PreprocessingProgress(job) as progress,
    ):
        for chunk in encoded:
            corpora.append(chunk)
            progress.show(corpora.totals, chunk.disk_bytes)
        require_documents(job, corpora.totals)
        corpora.finish()
    return corpora.totals


def _write_in_parts(job: PreprocessingJob, output_prefix: str) -> Totals:
    """Write part after part, from where an interrupted run with the same flags ended."""
    keys = len(job.prefixes)
    journal = Journal(output_prefix, job_digest(job))
    totals = Totals.zero(keys)
    for part in journal.parts:
        totals.include(part.totals)
    if journal.parts:
        log.info(f"going on behind {totals.documents} documents in {len(journal.parts)} parts")
    chunks = job.chunks()
    done = sum(chunk.disk_bytes for chunk in islice(chunks, journal.chunks))
    with (
        contextlib.closing(job.encoded(chunks)) as encoded,  # type: ignore[type-var]
        PreprocessingProgress(job, done) as progress,
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
            journal.add(CorpusPart(count, corpora.totals))
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


def what_decides(job: PreprocessingJob, *, times: bool = True) -> dict[str, Any]:
    """Return everything that determines the output bytes; not the encoder, as all agree.

    Without `times` it is the same on machines that have copies of one input.
    """
    settings = replace(job.settings, encoder="", splitter=Splitter())
    return {
        "settings": repr(settings),
        "sentence splitter": job.settings.splitter.description(),
        "chunk size": job.chunk_size,
        "tokenizer": digests_of_files(settings.tokenizer.files()),
        "input": job.source.identity(times=times),
    }


def job_digest(job: PreprocessingJob) -> str:
    """Return a digest of `what_decides`."""
    return hashlib.sha256(json.dumps(what_decides(job)).encode()).hexdigest()


class PreprocessingProgress:
    """A progress bar on a terminal, a line at intervals elsewhere; on standard error."""

    def __init__(
        self, job: PreprocessingJob, done: int = 0, *, size: int | None = None, silent: bool = False
    ) -> None:
        self._size = job.source.size if size is None else size
        self._done = done
        self._silent = silent
        self._log_interval = job.log_interval
        self._started = self._last_time = time.perf_counter()
        self._last_documents = 0
        self._bar = tqdm(
            total=self._size,
            initial=done,
            unit="B",
            unit_scale=True,
            disable=silent or not sys.stderr.isatty(),
        )

    def __enter__(self) -> "PreprocessingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, totals: Totals, disk_bytes: int) -> None:
        """Count one more chunk, and update the display if it is time."""
        self._done += disk_bytes
        now = time.perf_counter()
        if not self._bar.disable:
            self._bar.set_postfix_str(_rates(totals, now - self._started), refresh=False)
            self._bar.update(disk_bytes)
        elif not self._silent and self._is_time(totals.documents, now):
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


def print_summary(job: PreprocessingJob, totals: Totals, seconds: float) -> None:
    """Print what was written, what was left out, and the flag to train on it."""
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


def preprocessing_parser(prog: str = "preprocess_data.py") -> argparse.ArgumentParser:
    """Return the flags of preprocessing."""
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
    _check_input_flags(args)
    if args.keep_newlines and not args.split_sentences:
        raise ConfigError(
            "--keep-newlines affects how sentences are split, and nothing is split",
            found="--keep-newlines without --split-sentences",
            fix="add --split-sentences, or leave --keep-newlines out (documents keep everything)",
        )


def _check_input_flags(args: argparse.Namespace) -> None:
    if bool(args.input) == bool(args.hf_dataset):
        raise ConfigError(
            "the text is either in files or in a dataset",
            found="both --input and --hf-dataset" if args.input else "no --input",
            fix="give --input files and folders, or --hf-dataset with a path or a name",
        )
    for flag in ("hf_config", "hf_split"):
        if getattr(args, flag) and not args.hf_dataset:
            raise ConfigError(
                f"--{flag.replace('_', '-')} is about a dataset, and none is read",
                found=f"--{flag.replace('_', '-')} {getattr(args, flag)}",
                fix="add --hf-dataset, or leave it out",
            )
    punkt = {"--lang": args.lang, "--nltk-data": args.nltk_data}
    splitter = args.sentence_splitter if args.sentence_splitter != _BY_RULES else None
    for flag, value in (punkt | {"--sentence-splitter": splitter}).items():
        if value is not None and not args.split_sentences:
            raise ConfigError(
                f"{flag} affects how sentences are split, and nothing is split",
                found=f"{flag} {value} without --split-sentences",
                fix=f"add --split-sentences, or leave {flag} out",
            )


def _add_input_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--input",
        nargs="+",
        default=[],
        metavar="PATH",
        help=".jsonl, .json or .txt files (also .gz, .zst), .parquet files, or folders of them",
    )
    add(
        "--json-keys",
        "--hf-column",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of the text in each JSON line, or columns; each gets its own output [text]",
    )
    add(
        "--hf-dataset",
        metavar="NAME_OR_PATH",
        help="read a HuggingFace dataset instead: a folder of save_to_disk, a file, or the name "
        "of one that is in the cache (nothing is downloaded)",
    )
    add("--hf-config", metavar="NAME", help="configuration of that dataset")
    add("--hf-split", metavar="SPLIT", help="its split [the only one, or train]")
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
        help="make each sentence an item (for BERT)",
    )
    add(
        "--sentence-splitter",
        choices=SPLITTERS,
        default=_BY_RULES,
        help="how: by rules for punctuation, by nltk's Punkt, or by Punkt where it is installed "
        "and by rules elsewhere, with a note in the log [rules]",
    )
    add("--lang", metavar="LANGUAGE", help="which model of Punkt [english]")
    add(
        "--nltk-data",
        metavar="FOLDER",
        help="where Punkt's models are; without it, where nltk looks",
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


def _source(args: argparse.Namespace, settings: EncodeSettings) -> Source:
    if args.hf_dataset:
        name = DatasetName(args.hf_dataset, args.hf_config, args.hf_split)
        return open_dataset(name, settings.keys)
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
    rule = TextRule(args.text_documents, args.document_separator)
    return FileSource(inputs.files, rule, settings.keys)


def _output_prefixes(args: argparse.Namespace) -> list[str]:
    level = ItemLevel.SENTENCE if args.split_sentences else ItemLevel.DOCUMENT
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
    run_program(main)
