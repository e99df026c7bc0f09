"""From rows of text to token ids, in this process or in several, in the order of the input.

Memory does not grow with the input: at most `WINDOW_PER_WORKER` chunks per worker are on their way
at any time. Workers parse as well as tokenize; the reader only cuts lines.
"""

import dataclasses
import functools
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context, parent_process
from os import putenv
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.errors import DataError, MachineError
from megatron.tokenizer.splitters import Splitter
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec, require_eod
from tools.preprocessing.documents import (
    DocumentFile,
    DocumentRow,
    TextRule,
    fields_of,
    is_text,
    text_of,
)
from tools.preprocessing.encoders import EXACT, Encode, build_encoder

WINDOW_PER_WORKER = 4  # chunks on their way per worker: enough that none waits for the writer
BAD_LINES_SHOWN = 5  # of those that are skipped, by file and line
CHUNK_BYTES = 4 << 20  # a chunk is closed at this size even with few documents in it

Result = TypeVar("Result")


@dataclass(frozen=True)
class EncodeSettings:
    """The settings of a worker; hashable, so that each process builds one tokenizer for them."""

    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    splitter: Splitter = Splitter()
    keep_newlines: bool = False
    skip_bad_lines: bool = False
    encoder: str = EXACT


class Chunk(NamedTuple):
    """Consecutive documents of one file, as read."""

    path: Path
    rows: list[DocumentRow]
    disk_bytes: int  # by which the reader moved on in the (perhaps compressed) file


class Column(NamedTuple):
    """The kept documents of a chunk under one key."""

    tokens: npt.NDArray[np.integer]  # of all items, joined
    sizes: list[int]  # tokens in each item
    items: list[int]  # items in each document
    unknown: int  # tokens that are the tokenizer's unknown piece


class EncodedChunk(NamedTuple):
    """The result of a chunk: one column per key, all of the same documents."""

    columns: tuple[Column, ...]
    dropped: int
    text_bytes: int
    disk_bytes: int
    bad: int = 0  # rows that could not be used
    bad_examples: tuple[str, ...] = ()  # the first of them: file, line and what is wrong


class _Documents(NamedTuple):
    """The texts of a chunk under one key, encoded; a text without a token has no items."""

    tokens: npt.NDArray[np.integer]
    sizes: npt.NDArray[np.int64]  # tokens in each item
    items: npt.NDArray[np.int64]  # items in each document


def read_chunks(
    files: Sequence[Path],
    rule: TextRule,
    *,
    chunk_size: int = 25,
    columns: Sequence[str] = ("text",),
) -> Iterator[Chunk]:
    """Yield the documents of all files in order, `chunk_size` (or 4 MiB) at a time.

    `columns` are what is read of a .parquet file.
    """
    for path in files:
        source = DocumentFile(path, rule, columns=columns)
        rows: list[DocumentRow] = []
        size = seen = 0
        for row in source:
            rows.append(row)
            size += len(row.data)
            if len(rows) >= chunk_size or size >= CHUNK_BYTES:
                yield Chunk(path, rows, source.read_bytes - seen)
                rows, size, seen = [], 0, source.read_bytes
        yield Chunk(path, rows, source.read_bytes - seen)


def encode_in_order(
    chunks: Iterator[Chunk], encode: Callable[[Chunk], Result], *, workers: int
) -> Iterator[Result]:
    """Encode each chunk, in several processes if `workers` > 1; results are in input order.

    `encode` may do anything else with a chunk, as long as it and its result can be pickled.
    A process pool's own `map` reads its whole input ahead; here the next chunk is read only when
    the oldest one on its way has been taken.
    """
    if workers == 1:
        yield from map(encode, chunks)
        return
    # Spawned, not forked: the tokenizer libraries hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_prepare_worker)
    on_their_way: deque[Future[Result]] = deque()
    try:
        for chunk in chunks:
            on_their_way.append(_submit(pool, encode, chunk))
            if len(on_their_way) >= WINDOW_PER_WORKER * workers:
                yield on_their_way.popleft().result()
        while on_their_way:
            yield on_their_way.popleft().result()
    except BrokenProcessPool as error:
        raise MachineError(
            "a worker process died without an error, as when memory runs out",
            found=f"--workers {workers}",
            fix="look for 'Out of memory' in dmesg; use fewer --workers or cut long documents",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode_chunk(settings: EncodeSettings, chunk: Chunk) -> EncodedChunk:
    """Parse and tokenize the rows of a chunk, and drop those that are empty under any key.

    A row that cannot be used raises DataError, or is left out and counted with skip_bad_lines.
    """
    tokenizer = worker_tokenizer(settings.tokenizer)
    encode = encoder_of(settings.tokenizer, settings.encoder)
    rows, bad = _texts(settings, chunk)
    documents = [
        _documents(settings, encode, [row[index] for row in rows])
        for index in range(len(settings.keys))
    ]
    kept = np.logical_and.reduce([found.items > 0 for found in documents])
    return EncodedChunk(
        columns=tuple(_column(settings, tokenizer, found, kept) for found in documents),
        dropped=len(rows) - int(kept.sum()),
        text_bytes=sum(len(row.data) for row in chunk.rows),
        disk_bytes=chunk.disk_bytes,
        bad=len(bad),
        bad_examples=tuple(bad[:BAD_LINES_SHOWN]),
    )


def texts_of_rows(settings: EncodeSettings, chunk: Chunk) -> list[str]:
    """Return every text of a chunk, whatever its key, without unusable rows."""
    rows, _ = _texts(dataclasses.replace(settings, skip_bad_lines=True), chunk)
    return list(chain.from_iterable(rows))


@functools.cache
def worker_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Return the tokenizer of `spec`, made once per process: reading takes near a second."""
    return spec.build()


@functools.cache
def encoder_of(spec: TokenizerSpec, name: str) -> Encode:
    """Return the encoder `name` of `spec`, made once per process: this takes as long."""
    return build_encoder(name, worker_tokenizer(spec))


def _prepare_worker() -> None:
    # Read by the `tokenizers` library in this worker: N workers are N threads, not N x cores.
    putenv("TOKENIZERS_PARALLELISM", "false")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is killed, since it would wait for work forever."""
    owner = parent_process()
    if owner is not None:
        owner.join()
        signal.raise_signal(signal.SIGTERM)


def _submit(
    pool: ProcessPoolExecutor, encode: Callable[[Chunk], Result], chunk: Chunk
) -> Future[Result]:
    """Submit a chunk with Ctrl-C blocked, since a terminal sends it to the workers too.

    They inherit the blocked signal, and the owner of the pool, which gets it, ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(encode, chunk)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _texts(settings: EncodeSettings, chunk: Chunk) -> tuple[list[list[str]], list[str]]:
    """Return the texts of each usable row, one per key, and the error of each other row."""
    texts: list[list[str]] = []
    bad: list[str] = []
    for row in chunk.rows:
        try:
            if is_text(chunk.path):
                texts.append([text_of(chunk.path, row)])
            else:
                texts.append(fields_of(chunk.path, row, settings.keys))
        except DataError as error:
            if not settings.skip_bad_lines:
                raise
            bad.append(f"{error.found} ({error.problem})")
    return texts, bad


def _documents(settings: EncodeSettings, encode: Encode, texts: list[str]) -> _Documents:
    """Return the token ids of each item of each text, without empty items."""
    if settings.split_sentences:
        split = settings.splitter.build(keep_newlines=settings.keep_newlines)
        parts = [split(text) for text in texts]
        counts = np.array([len(sentences) for sentences in parts], np.int64)
        tokens, sizes = encode(list(chain.from_iterable(parts)))
    else:
        counts = np.ones(len(texts), np.int64)
        tokens, sizes = encode(texts)
    document = np.repeat(np.arange(len(texts)), counts)[sizes > 0]  # of each item
    return _Documents(tokens, sizes[sizes > 0], np.bincount(document, minlength=len(texts)))


def _column(
    settings: EncodeSettings,
    tokenizer: Tokenizer,
    found: _Documents,
    kept: npt.NDArray[np.bool_],
) -> Column:
    tokens, sizes, items = found
    if not kept.all():
        item_kept = np.repeat(kept, items)
        tokens = tokens[np.repeat(item_kept, sizes)]
        sizes, items = sizes[item_kept], items[kept]
    if settings.append_eod:
        last = np.cumsum(items) - 1
        ends = np.cumsum(sizes)[last] if len(last) else last
        tokens = np.insert(tokens, ends, require_eod(tokenizer, "--append-eod"))
        sizes[last] += 1
    largest = int(tokens.max()) if len(tokens) else 0
    assert largest < tokenizer.vocab_size  # noqa: S101  # invariant: the cast below cannot wrap
    tokens = tokens.astype(best_fitting_dtype(tokenizer.vocab_size))
    unknown = int((tokens == tokenizer.unk).sum()) if tokenizer.unk is not None else 0
    return Column(tokens, sizes.tolist(), items.tolist(), unknown)
