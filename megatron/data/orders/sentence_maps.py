"""The sentences of each sample: Megatron's sentence map (BERT, T5) and block map (ICT).

Bit for bit the reference's, by the compiled loops or by the twins here. What a reader would get
wrong: the generators are C++'s mt19937 and mt19937_64, so the draws and their number are part of
the format; the last epoch is always completed, so a map usually has more rows than requested.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.orders import sample_maps
from megatron.errors import DataError

UNLIMITED_EPOCHS = 2**31 - 2
LONGEST_SENTENCE = 512  # tokens; a document with a longer one is left out
_MOST_UINT32 = np.iinfo(np.uint32).max
_SMALLEST_PROBABILITY = 1e-9  # one in fewer than 2**32 draws

Rows = npt.NDArray[np.unsignedinteger]  # uint32 or uint64
Sizes = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceRule:
    """When a run of sentences is full, and when there are enough of them.

    `max_tokens` is the target length, without special tokens. `short_seq_prob` of the targets are
    shorter, down to two tokens; a block map has none of these.
    """

    num_samples: int
    max_tokens: int
    min_sentences: int
    seed: int
    short_seq_prob: float = 0.0
    num_epochs: int = UNLIMITED_EPOCHS

    def __post_init__(self) -> None:
        counts = (self.num_samples, self.min_sentences, self.num_epochs)
        counts_fit = min(counts) >= 1 and max(counts) < 2**63  # int64 in the compiled loops
        if not counts_fit or not 2 <= self.max_tokens <= _MOST_UINT32 or not 0 <= self.seed < 2**32:
            raise ValueError(f"{self}: a number is out of range")
        if self.short_seq_prob != 0 and not _SMALLEST_PROBABILITY <= self.short_seq_prob <= 1:
            raise ValueError(f"short_seq_prob {self.short_seq_prob}: 0, or from 1e-9 to 1")

    @property
    def short_ratio(self) -> int:
        """One in this many draws gives a short target; 0: never. Rounds away from zero, as C."""
        return 0 if self.short_seq_prob == 0 else math.floor(1 / self.short_seq_prob + 0.5)


def build_sentence_map(doc_idx: Int64s, sizes: Sizes, rule: SentenceRule) -> Rows:
    """Return rows (first sentence, end, target tokens), shuffled, [samples, 3].

    `doc_idx` are the borders of the documents to use, `sizes` the tokens of every sentence of the
    corpus. Raises DataError if no document gives a sample.
    """
    module = sample_maps.compiled()
    if module is None:
        return build_sentence_map_with_python(doc_idx, sizes, rule)
    documents = _usable_documents(doc_idx, sizes, rule.min_sentences, whole_if_single=True)

    def fill(rows: Rows) -> int:
        count: int = module.fill_sentence_map(
            documents.sizes,
            documents.starts,
            documents.stops,
            rows,
            epochs=rule.num_epochs,
            enough=rule.num_samples,
            max_tokens=rule.max_tokens,
            short_ratio=rule.short_ratio,
            seed=rule.seed,
            min_sentences=rule.min_sentences,
        )
        return count

    rows = _counted_and_filled(fill, len(sizes), 3)
    module.shuffle_rows(rows, rule.seed + 1)
    return rows


def build_sentence_map_with_python(doc_idx: Int64s, sizes: Sizes, rule: SentenceRule) -> Rows:
    """Return the Python twin of `build_sentence_map`."""
    documents = _usable_documents(doc_idx, sizes, rule.min_sentences, whole_if_single=True)
    draws = _mt19937(rule.seed)

    def next_target(_: int) -> int:
        if rule.short_ratio == 0:
            return rule.max_tokens
        drawn = next(draws)
        return rule.max_tokens if drawn % rule.short_ratio else 2 + drawn % (rule.max_tokens - 1)

    runs = _cut_into_runs(documents, rule, next_target, min_left=2)
    table = [(run.begin, run.end, run.target) for run in runs]
    return _shuffled(np.array(table, _row_type(len(sizes))), rule.seed + 1)


def build_block_map(doc_idx: Int64s, sizes: Sizes, title_sizes: Sizes, rule: SentenceRule) -> Rows:
    """Return shuffled rows [blocks, 4]: first sentence, end, document, number in its epoch.

    Documents count from the start of `doc_idx`; `title_sizes` has one entry for each of them, which
    is taken from the target length. Raises DataError if no document gives a block.
    """
    module = sample_maps.compiled()
    if module is None:
        return build_block_map_with_python(doc_idx, sizes, title_sizes, rule)
    documents, targets = _block_targets(doc_idx, sizes, title_sizes, rule)

    def fill(rows: Rows) -> int:
        count: int = module.fill_block_map(
            documents.sizes,
            documents.starts,
            documents.stops,
            rows,
            epochs=rule.num_epochs,
            enough=rule.num_samples,
            targets=targets,
            documents=documents.numbers,
            min_sentences=rule.min_sentences,
        )
        return count

    rows = _counted_and_filled(fill, len(sizes), 4)
    module.shuffle_rows(rows, rule.seed + 1)
    return rows


def build_block_map_with_python(
    doc_idx: Int64s, sizes: Sizes, title_sizes: Sizes, rule: SentenceRule
) -> Rows:
    """Return the Python twin of `build_block_map`."""
    documents, targets = _block_targets(doc_idx, sizes, title_sizes, rule)
    target_of, numbers = targets.tolist(), documents.numbers.tolist()
    runs = _cut_into_runs(documents, rule, target_of.__getitem__, min_left=rule.min_sentences)
    table = [(run.begin, run.end, numbers[run.document], run.number) for run in runs]
    return _shuffled(np.array(table, _row_type(len(sizes))), rule.seed + 1)


class _Documents(NamedTuple):
    """The documents that can give a sample: their numbers in `doc_idx` and their sentences."""

    sizes: Sizes
    numbers: Int64s
    starts: Int64s
    stops: Int64s


class _Run(NamedTuple):
    """Sentences begin..end - 1 of the `document`-th usable document."""

    begin: int
    end: int
    target: int
    document: int
    number: int  # within its epoch


def _usable_documents(
    doc_idx: Int64s, sizes: Sizes, min_sentences: int, *, whole_if_single: bool
) -> _Documents:
    """Return the documents of enough sentences, none of them too long.

    With `whole_if_single` a document of one sentence is used however long that is.
    """
    # The index of a corpus is an unaligned view of its file; compiled code must not see that.
    borders = np.require(doc_idx, np.int64, ["C", "A"])
    sizes = np.require(sizes, np.int32, ["C", "A"])
    if len(borders) and (borders[0] < 0 or borders[-1] > len(sizes)):
        raise ValueError(f"doc_idx {borders[0]}..{borders[-1]} of {len(sizes)} sentences")
    starts, stops = borders[:-1], borders[1:]
    counts = stops - starts
    if (counts < 0).any():
        raise ValueError("doc_idx decreases")
    long_sentences = np.flatnonzero(sizes > LONGEST_SENTENCE)
    has_long = np.searchsorted(long_sentences, stops) > np.searchsorted(long_sentences, starts)
    if whole_if_single:
        has_long &= counts > 1
    numbers = np.flatnonzero((counts >= min_sentences) & ~has_long)
    if len(numbers) == 0:
        raise _no_sample(counts, has_long, min_sentences)
    return _Documents(sizes, numbers, starts[numbers], stops[numbers])


def _no_sample(counts: Int64s, has_long: npt.NDArray[np.bool_], min_sentences: int) -> DataError:
    few = int((counts < min_sentences).sum())
    return DataError(
        "no document gives a sample of sentences",
        found=f"{len(counts)} documents: {few} of fewer than {min_sentences} sentences, "
        f"{int(has_long.sum())} with a sentence of more than {LONGEST_SENTENCE} tokens",
        fix="preprocess the corpus with --split-sentences, or give this split more documents",
    )


def _block_targets(
    doc_idx: Int64s, sizes: Sizes, title_sizes: Sizes, rule: SentenceRule
) -> tuple[_Documents, Int64s]:
    """Return the usable documents, and how many tokens of text fill a block of each."""
    if rule.short_seq_prob != 0 or len(title_sizes) != len(doc_idx) - 1:
        raise ValueError(
            f"short_seq_prob {rule.short_seq_prob} of a block map (it has none), "
            f"{len(title_sizes)} titles of {len(doc_idx) - 1} documents"
        )
    documents = _usable_documents(doc_idx, sizes, rule.min_sentences, whole_if_single=False)
    return documents, rule.max_tokens - title_sizes[documents.numbers].astype(np.int64)


def _row_type(num_sentences: int) -> type[np.uint32] | type[np.uint64]:
    return np.uint32 if num_sentences <= _MOST_UINT32 else np.uint64


def _counted_and_filled(fill: Callable[[Rows], int], num_sentences: int, width: int) -> Rows:
    dtype = _row_type(num_sentences)
    rows: Rows = np.zeros((fill(np.zeros((0, width), dtype)), width), dtype)
    fill(rows)
    return rows


def _cut_into_runs(
    documents: _Documents, rule: SentenceRule, next_target: Callable[[int], int], *, min_left: int
) -> Iterator[_Run]:
    """Yield runs as the compiled loop does, with one more `next_target` after a document."""
    sizes = documents.sizes
    spans = list(zip(documents.starts.tolist(), documents.stops.tolist()))
    runs = 0
    for _ in range(rule.num_epochs):
        if runs >= rule.num_samples:
            return
        before = runs
        for document, (begin, stop) in enumerate(spans):
            target, tokens = next_target(document), 0
            for end, size in enumerate(sizes[begin:stop].tolist(), start=begin + 1):
                tokens += size
                left = stop - end
                full = tokens >= target and end - begin >= rule.min_sentences
                if left == 0 or (full and left >= min_left):
                    yield _Run(begin, end, target, document, runs - before)
                    runs += 1
                    begin, tokens, target = end, 0, next_target(document)


def _shuffled(rows: Rows, seed: int) -> Rows:
    """Shuffle as Megatron does: from the last row down, swap with row `draw % (i + 1)`."""
    order = list(range(len(rows)))
    for i, drawn in zip(range(len(order) - 1, 0, -1), _mt19937_64(seed)):
        j = drawn % (i + 1)
        order[i], order[j] = order[j], order[i]
    return rows[order]


def _mt19937(seed: int) -> Iterator[int]:
    """Yield the 32-bit numbers of C++'s `std::mt19937(seed)`, which is numpy's legacy generator."""
    rng = np.random.RandomState(seed)
    while True:
        yield from rng.randint(0, 2**32, 1024, np.uint32).tolist()


def _mt19937_64(seed: int) -> Iterator[int]:
    """Yield the numbers of C++'s `std::mt19937_64(seed)` (Nishimura 2000); numpy lacks it."""
    mask, size, shift = 2**64 - 1, 312, 156
    state = [seed & mask]
    for i in range(1, size):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & mask)
    while True:
        for i in range(size):
            high, low = state[i] & 0xFFFFFFFF80000000, state[(i + 1) % size] & 0x7FFFFFFF
            twisted = (high | low) >> 1 ^ (0xB5026F5AA96619E9 if low & 1 else 0)
            state[i] = state[(i + shift) % size] ^ twisted
        for word in state:
            word ^= word >> 29 & 0x5555555555555555
            word ^= word << 17 & 0x71D67FFFEDA60000
            word ^= word << 37 & 0xFFF7EEE000000000
            yield word ^ word >> 43
