"""From rows of text to token ids, in this process or in several, in the order of the input.

Memory does not grow with the input: at most `WINDOW_PER_WORKER` chunks per worker are on their way
at any time. Workers parse as well as tokenize; the reader only cuts lines.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from os import putenv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import best_fitting_dtype
from megatron.errors import MachineError
from megatron.tokenizer.sentences import split_sentences
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec, require_eod
from tools.documents import DocumentFile, Row, TextRule, fields_of, is_text, text_of

WINDOW_PER_WORKER = 4  # chunks on their way per worker: enough that none waits for the writer
_CHUNK_BYTES = 4 << 20  # a chunk is closed at this size even with few documents in it


@dataclass(frozen=True)
class EncodeSettings:
    """What a worker must know; hashable, so that each process builds one tokenizer for it."""

    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False


class Chunk(NamedTuple):
    """Consecutive documents of one file, as read."""

    path: Path
    rows: list[Row]
    disk_bytes: int  # by which the reader moved on in the (perhaps compressed) file


class Column(NamedTuple):
    """The kept documents of a chunk under one key."""

    tokens: npt.NDArray[np.integer]  # of all items, joined
    sizes: list[int]  # tokens in each item
    items: list[int]  # items in each document
    unknown: int  # tokens that are the tokenizer's unknown piece


class EncodedChunk(NamedTuple):
    """What becomes of a chunk: one column per key, all of the same documents."""

    columns: tuple[Column, ...]
    dropped: int
    text_bytes: int
    disk_bytes: int


def read_chunks(files: Sequence[Path], rule: TextRule, *, chunk_size: int = 25) -> Iterator[Chunk]:
    """The documents of all files in order, `chunk_size` of them (or 4 MiB) at a time."""
    for path in files:
        source = DocumentFile(path, rule)
        rows: list[Row] = []
        size = seen = 0
        for row in source:
            rows.append(row)
            size += len(row.data)
            if len(rows) >= chunk_size or size >= _CHUNK_BYTES:
                yield Chunk(path, rows, source.read_bytes - seen)
                rows, size, seen = [], 0, source.read_bytes
        yield Chunk(path, rows, source.read_bytes - seen)


def encode_in_order(
    chunks: Iterator[Chunk], encode: Callable[[Chunk], EncodedChunk], *, workers: int
) -> Iterator[EncodedChunk]:
    """Encode each chunk, in `workers` processes if more than one; results come in input order.

    A process pool's own `map` reads its whole input ahead; here the next chunk is read only when
    the oldest one on its way has been taken.
    """
    if workers == 1:
        yield from map(encode, chunks)
        return
    # Spawned, not forked: the tokenizer libraries hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread_each)
    on_their_way: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            on_their_way.append(pool.submit(encode, chunk))
            if len(on_their_way) >= WINDOW_PER_WORKER * workers:
                yield on_their_way.popleft().result()
        while on_their_way:
            yield on_their_way.popleft().result()
    except BrokenProcessPool as error:
        raise MachineError(
            "a worker process died without a word, as when memory runs out",
            found=f"--workers {workers}",
            fix="look for 'Out of memory' in dmesg; use fewer --workers or cut long documents",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode_chunk(settings: EncodeSettings, chunk: Chunk) -> EncodedChunk:
    """Parse and tokenize the rows of a chunk, and drop those that are empty under any key."""
    tokenizer = _tokenizer(settings.tokenizer)
    by_key = _texts_by_key(settings, chunk)
    documents = [_items(settings, tokenizer, texts) for texts in by_key]
    kept = [row for row in range(len(chunk.rows)) if all(column[row] for column in documents)]
    dtype = best_fitting_dtype(tokenizer.vocab_size)
    return EncodedChunk(
        columns=tuple(
            _column(settings, tokenizer, [column[row] for row in kept], dtype)
            for column in documents
        ),
        dropped=len(chunk.rows) - len(kept),
        text_bytes=sum(len(row.data) for row in chunk.rows),
        disk_bytes=chunk.disk_bytes,
    )


@functools.cache
def _tokenizer(spec: TokenizerSpec) -> Tokenizer:
    return spec.build()


def _one_thread_each() -> None:
    # Read by the `tokenizers` library in this worker: N workers are N threads, not N x cores.
    putenv("TOKENIZERS_PARALLELISM", "false")


def _texts_by_key(settings: EncodeSettings, chunk: Chunk) -> list[list[str]]:
    if is_text(chunk.path):
        return [[text_of(chunk.path, row) for row in chunk.rows]]
    rows = [fields_of(chunk.path, row, settings.keys) for row in chunk.rows]
    return [[row[index] for row in rows] for index in range(len(settings.keys))]


def _items(
    settings: EncodeSettings, tokenizer: Tokenizer, texts: list[str]
) -> list[list[list[int]]]:
    """The token ids of each item of each text; an item without a token is left out."""
    if not settings.split_sentences:
        return [[ids] if ids else [] for ids in tokenizer.tokenize_batch(texts)]
    parts = [split_sentences(text, keep_newlines=settings.keep_newlines) for text in texts]
    encoded = iter(tokenizer.tokenize_batch(list(chain.from_iterable(parts))))
    return [[ids for _ in sentences if (ids := next(encoded))] for sentences in parts]


def _column(
    settings: EncodeSettings,
    tokenizer: Tokenizer,
    documents: list[list[list[int]]],
    dtype: npt.DTypeLike,
) -> Column:
    if settings.append_eod:
        eod = require_eod(tokenizer, "--append-eod")
        for items in documents:
            items[-1].append(eod)
    flat = list(chain.from_iterable(documents))
    sizes = [len(ids) for ids in flat]
    # numpy refuses an id that does not fit, it does not wrap it (NEP 50).
    tokens = np.fromiter(chain.from_iterable(flat), dtype, count=sum(sizes))
    unknown = int((tokens == tokenizer.unk).sum()) if tokenizer.unk is not None else 0
    return Column(tokens, sizes, [len(items) for items in documents], unknown)
