"""Text to the .bin/.idx corpus that training reads: tokenized in many processes, order kept.

A row is kept under every key of --json-keys or dropped under every key, so that the outputs of one
run stay aligned row by row. Nothing appears under its final name before everything has been
tokenized. The work between text and ids is in `tools.encoding`, the file formats are
`megatron.data.indexed_dataset`'s.
"""

import argparse
import contextlib
import functools
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from megatron import log
from megatron.data.corpus_metadata import CorpusMetadata, metadata_file_path
from megatron.data.indexed_dataset import (
    MMapIndexedDatasetBuilder,
    best_fitting_dtype,
    data_file_path,
    index_file_path,
)
from megatron.errors import ConfigError, DataError
from megatron.program import run
from megatron.tokenizer.tokenizer import (
    TOKENIZER_TYPES,
    Tokenizer,
    TokenizerSpec,
    require_eod,
)
from tools.documents import TEXT_RULES, InputFiles, TextRule, find_inputs, is_text
from tools.encoding import (
    Column,
    EncodedChunk,
    EncodeSettings,
    encode_chunk,
    encode_in_order,
    read_chunks,
)

_SECONDS_BETWEEN_LINES = 5.0  # of progress, where standard error is no terminal


@dataclass
class Totals:
    """Counts of the run so far; the lists have one entry per key."""

    items: list[int]
    tokens: list[int]
    unknown: list[int]
    documents: int = 0
    dropped: int = 0
    text_bytes: int = 0

    def add(self, encoded: EncodedChunk) -> None:
        for index, column in enumerate(encoded.columns):
            self.items[index] += len(column.sizes)
            self.tokens[index] += len(column.tokens)
            self.unknown[index] += column.unknown
        self.documents += len(encoded.columns[0].items)
        self.dropped += encoded.dropped
        self.text_bytes += encoded.text_bytes


def main(argv: list[str] | None = None) -> None:
    """Read, tokenize, write, and say what was written; raises MegatronError."""
    args = _parse(argv)
    settings = EncodeSettings(
        tokenizer=_tokenizer_spec(args),
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
    )
    tokenizer = settings.tokenizer.build()  # every mistake in its flags shows before any work
    if args.append_eod:
        require_eod(tokenizer, "--append-eod")
    prefixes = _output_prefixes(args)
    inputs = _inputs(args, settings)
    rule = TextRule(args.text_documents, args.document_separator)
    chunks = read_chunks(inputs.files, rule, chunk_size=args.chunk_size)
    encoded = encode_in_order(
        chunks, functools.partial(encode_chunk, settings), workers=args.workers
    )
    started = time.perf_counter()
    totals = _write(args, settings, tokenizer, prefixes, inputs, encoded)
    _print_summary(totals, tokenizer, prefixes, settings, time.perf_counter() - started)


def _write(
    args: argparse.Namespace,
    settings: EncodeSettings,
    tokenizer: Tokenizer,
    prefixes: list[str],
    inputs: InputFiles,
    encoded: Iterator[EncodedChunk],
) -> Totals:
    """Feed the builders and finish them together, or leave nothing."""
    zeros = [0] * len(prefixes)
    totals = Totals(items=list(zeros), tokens=list(zeros), unknown=list(zeros))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(encoded))  # type: ignore[type-var]
        builders = [
            stack.enter_context(_builder(prefix, key, settings, tokenizer))
            for prefix, key in zip(prefixes, settings.keys)
        ]
        progress = stack.enter_context(_Progress(inputs, args.log_interval))
        for chunk in encoded:
            for builder, column in zip(builders, chunk.columns):
                _append(builder, column)
            totals.add(chunk)
            progress.show(totals, chunk.disk_bytes)
        if not totals.documents:
            raise DataError(
                "no document is left, so there is nothing to write",
                found=f"{totals.dropped} empty documents in {len(inputs.files)} files",
                fix="check --input and --json-keys",
            )
        _finish_together(builders)
    return totals


def _builder(
    prefix: str, key: str, settings: EncodeSettings, tokenizer: Tokenizer
) -> MMapIndexedDatasetBuilder:
    return MMapIndexedDatasetBuilder(
        prefix,
        best_fitting_dtype(tokenizer.vocab_size),
        metadata=CorpusMetadata(
            tokenizer_type=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod if settings.append_eod else None,
            level="sentence" if settings.split_sentences else "document",
            json_key=key,
        ),
    )


def _append(builder: MMapIndexedDatasetBuilder, column: Column) -> None:
    start = item = 0
    for count in column.items:
        for size in column.sizes[item : item + count]:
            builder.add_item(column.tokens[start : start + size])
            start += size
        item += count
        builder.end_document()


def _finish_together(builders: Sequence[MMapIndexedDatasetBuilder]) -> None:
    """Give all outputs their names; if one cannot be finished, none stays."""
    finished: list[str] = []
    try:
        for builder in builders:
            builder.finalize()
            finished.append(builder.prefix)
    except BaseException:
        for prefix in finished:
            for path in _output_files(prefix):
                path.unlink(missing_ok=True)
        raise


class _Progress:
    """A bar on a terminal, a line now and then anywhere else; always on standard error."""

    def __init__(self, inputs: InputFiles, log_interval: int | None) -> None:
        self._size = sum(path.stat().st_size for path in inputs.files)
        self._done = 0
        self._log_interval = log_interval
        self._started = self._last_time = time.perf_counter()
        self._last_documents = 0
        self._bar = tqdm(
            total=self._size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> "_Progress":
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


def _print_summary(
    totals: Totals,
    tokenizer: Tokenizer,
    prefixes: Sequence[str],
    settings: EncodeSettings,
    seconds: float,
) -> None:
    dtype = np.dtype(best_fitting_dtype(tokenizer.vocab_size))
    print(f"{'key':<16}{'documents':>12}{'items':>12}{'tokens':>16}{'.bin bytes':>16}")
    for key, items, tokens in zip(settings.keys, totals.items, totals.tokens):
        print(
            f"{key:<16}{totals.documents:>12}{items:>12}{tokens:>16}{tokens * dtype.itemsize:>16}"
        )
    print(
        f"read {totals.text_bytes / 1e6:.1f} MB in {seconds:.1f} s ({_rates(totals, seconds)}), "
        f"vocabulary {tokenizer.vocab_size}, {dtype.name}"
    )
    if totals.dropped:
        print(f"dropped {totals.dropped} documents that were empty under at least one key")
    for key, unknown, tokens in zip(settings.keys, totals.unknown, totals.tokens):
        if unknown:
            log.warning(
                f"{unknown} of {tokens} tokens under {key!r} ({unknown / tokens:.4%}) are the "
                "unknown piece: that text is lost to the model"
            )
    for prefix in prefixes:
        print(f"--data-path {prefix}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py", description="Tokenize text into .bin/.idx files for training."
    )
    _add_input_flags(parser.add_argument_group("input"))
    _add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    _add_output_flags(parser.add_argument_group("output"))
    args = parser.parse_args(argv)
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
    return args


def _add_input_flags(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .json or .txt files (also .gz, .zst), or folders of them",
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
    add = group.add_argument
    add("--tokenizer-type", required=True, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    add("--vocab-file", help="vocab.json of GPT-2, vocab.txt of BERT")
    add("--merge-file", help="merges.txt of GPT-2")
    add("--tokenizer-model", help=".model file of SentencePiece")
    add("--tokenizer-name-or-path", help="tokenizer.json or a folder that holds one")
    add("--vocab-size", type=int, help="NullTokenizer: how many ids, without the document end")
    add("--vocab-extra-ids", type=int, default=0, help="add <extra_id_0> and so on [0]")
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
    add("--workers", type=int, default=1, help="processes that tokenize; 1: no other process [1]")
    add("--chunk-size", type=int, default=25, help="documents sent to a worker at a time [25]")
    add(
        "--log-interval",
        type=int,
        metavar="DOCUMENTS",
        help="documents between lines of progress; without it a line every 5 seconds",
    )


def _tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec:
    return TokenizerSpec(
        tokenizer_type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        tokenizer_name_or_path=args.tokenizer_name_or_path,
        vocab_size=args.vocab_size,
        vocab_extra_ids=args.vocab_extra_ids,
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
        for path in _output_files(prefix):
            if path.exists() and not args.overwrite:
                raise ConfigError(
                    "the output exists",
                    found=str(path),
                    fix="add --overwrite to replace it, or choose another --output-prefix",
                )
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    return prefixes


def _output_files(prefix: str) -> tuple[Path, ...]:
    return (
        Path(index_file_path(prefix)),
        Path(data_file_path(prefix)),
        Path(metadata_file_path(prefix)),
    )


if __name__ == "__main__":
    run(main)
