"""How many samples the corpora of a run hold, and what its training takes of each.

Only lengths of documents are read. What a reader would get wrong: what a corpus of sentences or of
packed rows holds depends on draws and on order, so the number of its samples is an upper bound.
"""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.data import DataConfig, OnTooLong
from megatron.data.corpus.metadata import ItemLevel
from megatron.data.corpus.weighted_paths import WeightedRange, weighted_splits
from megatron.data.data_utils import (
    Corpus,
    WeightedPrefix,
    named_prefixes,
    parse_data_path,
    split_ranges,
)
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.program_data import ProgramData
from megatron.errors import MegatronError
from megatron.lengths import batch_schedule, duration
from megatron.preflight.run import RunPlan

Ranges = Sequence[tuple[Corpus, int, int]]  # documents [start, stop) of each


class CorpusSupply(NamedTuple):
    """What the training takes of one corpus, and what that holds; None where it is not known."""

    prefix: str
    share: float  # of the samples of the run
    samples: int  # that the run takes of it
    documents: int | None = None  # of the training split
    tokens: int | None = None  # in those
    epochs: float | None = None  # at least


def training_parts(data: DataConfig) -> Sequence[WeightedPrefix | WeightedRange]:
    """Return the weighted corpora of the training; none of mock data.

    Raises:
        ConfigError: the flags cannot be read.
    """
    if data.has_weighted_splits:
        splits = weighted_splits(data)
        return () if splits is None else splits.train[0].ranges
    words = data.data_path or data.train_data_path
    return () if words is None else parse_data_path(words)


def absent_corpora(plan: RunPlan) -> tuple[str, ...]:
    """Return the corpora of the flags of which this machine has no file.

    Raises:
        ConfigError: the flags cannot be read.
    """
    return tuple(filter(_is_absent, named_prefixes(plan.config.data)))


def training_supply(plan: RunPlan) -> list[CorpusSupply]:
    """Return what a whole run takes of each corpus of its training; none of mock data.

    Raises:
        ConfigError: the flags cannot be read.
    """
    config = plan.config
    replicas = plan.data_parallel_size
    assert replicas is not None  # noqa: S101  # invariant: checked before
    total = duration(config, batch_schedule(config, replicas)).total_samples
    parts = training_parts(config.data)
    weights = sum(part.weight for part in parts)
    found = []
    for part in parts:
        share = part.weight / weights
        taken = CorpusSupply(part.prefix, share, round(total * share))
        corpus = None if _is_absent(part.prefix) else plan.corpora.find(config.data, part.prefix)
        if corpus is None or isinstance(corpus, MegatronError):  # of which a check says why
            found.append(taken)
            continue
        start, stop = _training_range(config.data, part, corpus)
        tokens, samples = supply(plan, [(corpus, start, stop)])
        epochs = taken.samples / samples if samples else None
        found.append(taken._replace(documents=stop - start, tokens=tokens, epochs=epochs))
    return found


def supply(plan: RunPlan, parts: Ranges) -> tuple[int, int]:
    """Return the tokens in ranges of documents, and the most samples of one pass over them."""
    data, kind = plan.config.data, plan.reads.kind(plan.config.data)
    if kind.is_packed:
        row = data.seq_length + 1
        lengths = [corpus.lengths[start:stop] for corpus, start, stop in parts]
        if data.on_too_long_document is OnTooLong.CUT:
            lengths = [each.clip(max=row) for each in lengths]
        fitting = [each[(each > 0) & (each <= row)] for each in lengths]
        tokens = sum(int(each.sum(dtype="int64")) for each in fitting)
        # Two rows that follow each other hold more than one row's tokens, as the second began
        # because its first document did not fit into the first; or else one too long began it.
        breaks = sum(int((each > row).sum()) for each in lengths)
        return tokens, min(sum(map(len, fitting)), 2 * tokens // row + 1 + breaks)
    if kind is DatasetKind.PAIRS:
        lengths = [corpus.lengths[start:stop] for corpus, start, stop in parts]
        return sum(int(each.sum(dtype="int64")) for each in lengths), sum(map(len, lengths))
    if kind.level is ItemLevel.SENTENCE:
        sentences = [_sentences(corpus, start, stop) for corpus, start, stop in parts]
        # Every sample has a sentence at least; how many it has depends on draws.
        return sum(int(each.sum(dtype="int64")) for each in sentences), sum(map(len, sentences))
    tokens = sum(
        int(corpus.lengths[start:stop].sum(dtype="int64")) for corpus, start, stop in parts
    )
    if kind is DatasetKind.IMAGES:
        return tokens, sum(stop - start for _, start, stop in parts)
    return tokens, max(tokens - 1, 0) // tokens_of_a_sample(data, plan.reads)


def _sentences(corpus: Corpus, start: int, stop: int) -> npt.NDArray[np.integer]:
    """Return the length of each sentence of documents [start, stop)."""
    (indexed,) = corpus.files
    return indexed.sizes[indexed.doc_idx[start] : indexed.doc_idx[stop]]


def tokens_of_a_sample(data: DataConfig, reads: ProgramData) -> int:
    """Return the tokens that a sample takes of its corpus; ConfigError for invalid flags."""
    is_corrupted = reads.kind(data) is DatasetKind.MLM
    return reads.spans(data).raw_length if is_corrupted else data.seq_length


def _is_absent(prefix: str) -> bool:
    """Return whether no index and no tokens on this machine have a name that begins so."""
    path = Path(prefix)
    near = path.parent.glob(glob.escape(path.name) + "*")
    return not any(other.suffix in (".idx", ".bin") for other in near)


def _training_range(
    data: DataConfig, part: WeightedPrefix | WeightedRange, corpus: Corpus
) -> tuple[int, int]:
    """Return the documents of a corpus that the training may read: [start, stop)."""
    if isinstance(part, WeightedRange):
        return part.items(corpus.num_documents)
    if data.data_path is None:
        return 0, corpus.num_documents
    start, stop, *_ = split_ranges(data.split, corpus.num_documents)
    return start, stop
