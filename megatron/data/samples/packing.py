"""Whole documents laid into rows of fixed length, in the order of Megatron-DeepSpeed's MTF packing.

`PackedDataset` defines the order and the rows; its source defines the documents. What a reader
would get wrong: a row is `seq_length + 1` tokens, and the rows of an epoch are not the documents of
an epoch, as a row that is unfinished at the end of an epoch continues in the next.
"""

import operator
from functools import partial
from typing import NamedTuple, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import log
from megatron.config.data import OnTooLong
from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.orders.index_cache import IndexCache, description_digest
from megatron.errors import DataError

_ORDER_VERSION = 1  # of the recipe below; part of every cache key
PADDING = 0  # the segment id of padding


class PackedDocument(NamedTuple):
    """One document as its source gives it; both arrays are of the document's length."""

    tokens: npt.NDArray[np.integer]
    is_input: npt.NDArray[np.integer] | npt.NDArray[np.bool_]  # true: an input, not to be predicted


class DocumentSource(Protocol):
    """The interface of a corpus for packing."""

    @property
    def prefix(self) -> str:
        """The name of the corpus in messages."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        ...

    def document(self, number: int) -> PackedDocument:
        """Return one document."""
        ...

    def fingerprint(self) -> str:
        """Return hex digits that change with the corpus."""
        ...

    def check_unchanged(self) -> None:
        """Raise DataError if a file was touched since it was opened."""
        ...


class PackedDataset:
    """Sample i is three int64 arrays [seq_length + 1], with whole documents one after the other.

    They are `text`, with `pad` at the end; `segment_ids`, 1, 2, ... by document and 0 for padding;
    `is_input`, 1 where a token is given and not to be predicted. `documents` are those of this
    split. Raises DataError when they cannot fill a row.
    """

    when_too_long = OnTooLong.SKIP  # unless the constructor is given another

    def __init__(
        self,
        source: DocumentSource,
        documents: DocumentSlice,
        *,
        num_samples: int,
        seq_length: int,
        seed: int,
        pad: int,
        cache: IndexCache,
        on_too_long: OnTooLong | None = None,
    ) -> None:
        if num_samples < 1 or seq_length < 1:
            raise ValueError(f"num_samples {num_samples} and seq_length {seq_length}: 1 or more")
        self.source, self.name = source, documents.name
        self.seq_length, self.pad = seq_length, pad
        chosen = np.arange(documents.start, documents.stop, dtype=np.int64)
        policy = self.when_too_long if on_too_long is None else OnTooLong(on_too_long)
        lengths = self._checked_lengths(chosen, policy)
        description: dict[str, str | int | float] = {
            "order": f"packed-{_ORDER_VERSION}",
            "corpus": source.fingerprint(),
            "documents": xxhash.xxh3_128_hexdigest(chosen.data),
            "seq_length": seq_length,
            "seed": seed,
            "num_samples": num_samples,
            "on_too_long": str(policy),
        }
        self._fingerprint = description_digest(description)
        self._documents_per_epoch = len(chosen)
        build = partial(
            build_packed_indices,
            lengths,
            chosen,
            num_samples=num_samples,
            row_length=self.row_length,
            seed=seed,
        )
        self._index = cache.load_or_build(self.name, description, build=build)

    @property
    def row_length(self) -> int:
        """Tokens of a sample: one more than the model sees, as the last is only a label."""
        return self.seq_length + 1

    def __len__(self) -> int:
        return len(self._index["sample_idx"])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        start, stop = self._index["sample_idx"][i].tolist()
        text = np.full(self.row_length, self.pad, np.int64)
        segment_ids = np.full(self.row_length, PADDING, np.int64)
        is_input = np.zeros(self.row_length, np.int64)
        at = 0
        for segment, number in enumerate(self._index["shuffle_idx"][start:stop].tolist(), 1):
            document = self.source.document(number)
            size = min(int(self.source.lengths[number]), self.row_length)
            end = at + size
            if end > self.row_length or min(map(len, document)) < size:
                raise DataError(
                    f"sample {i} of {self.name} is not what its index says",
                    found=f"document {number} with {len(document.tokens)} tokens and "
                    f"{len(document.is_input)} flags at {at} of {self.row_length}",
                    fix="remove the index cache and start again; report this if it comes back",
                )
            text[at:end] = document.tokens[:size]
            segment_ids[at:end] = segment
            is_input[at:end] = document.is_input[:size]
            at = end
        return {"text": text, "segment_ids": segment_ids, "is_input": is_input}

    def epochs(self, rows: int) -> float:
        """Return passes over the documents that the first `rows` rows are."""
        place = int(self._index["sample_idx"][rows - 1, 1]) if rows else 0
        return place / self._documents_per_epoch

    @property
    def index_files(self) -> dict[str, str]:
        """The cache file behind each of sample_idx and shuffle_idx."""
        return {key: str(path) for key, path in self._index.files.items()}

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes and order are."""
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus was touched since it was opened."""
        self.source.check_unchanged()

    def _checked_lengths(
        self, documents: npt.NDArray[np.int64], on_too_long: OnTooLong
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of each of `documents`, with the policy for long ones applied."""
        prefix = self.source.prefix
        if len(documents) == 0:
            raise DataError(
                f"the {self.name} split of {prefix} is empty",
                found=f"0 of {len(self.source.lengths)} documents",
                fix="give it a larger part with --split, or a corpus of its own",
            )
        if int(documents.min()) < 0 or int(documents.max()) >= len(self.source.lengths):
            raise ValueError(
                f"documents {documents.min()}..{documents.max()} of {len(self.source.lengths)}"
            )
        lengths = self.source.lengths[documents]
        too_long = int((lengths > self.row_length).sum())
        longest = f"{too_long} of {len(documents)}, the longest with {lengths.max()} tokens; "
        longest += f"a row holds {self.row_length}"
        if too_long and on_too_long is OnTooLong.ERROR:
            raise DataError(
                f"documents of the {self.name} split of {prefix} are longer than a row",
                found=longest,
                fix=f"use --seq-length {lengths.max() - 1} or more, or --on-too-long-document skip",
            )
        if on_too_long is OnTooLong.CUT:
            lengths = np.minimum(lengths, self.row_length)
        elif too_long == len(documents):
            raise DataError(
                f"every document of the {self.name} split of {prefix} is longer than a row",
                found=longest,
                fix=f"use --seq-length {self.source.lengths[documents].min() - 1} or more",
            )
        if not lengths[lengths <= self.row_length].any():
            raise DataError(
                f"the {self.name} split of {prefix} has no tokens to fill a row with",
                found=f"{len(documents) - too_long} documents that fit, all empty",
                fix="give it a larger part with --split, or preprocess the corpus again",
            )
        if too_long:
            done = "cut to it" if on_too_long is OnTooLong.CUT else "left out"
            log.warning(f"{self.name} split of {prefix}: longer than a row and {done}: {longest}")
        return lengths


def build_packed_indices(
    lengths: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int64],
    *,
    num_samples: int,
    row_length: int,
    seed: int,
) -> dict[str, npt.NDArray[np.integer]]:
    """Return `shuffle_idx` int64 [epochs x documents], and `sample_idx` int64 [rows, 2] into it.

    Whole epochs are packed until there are more than `num_samples` rows; each shuffles all
    documents with one RandomState. A row takes documents while they fit; one longer than a row
    ends the row before it and is in none. The unfinished row of the last epoch is dropped.
    """
    if not lengths[lengths <= row_length].any():
        raise ValueError(f"no document has between 1 and {row_length} tokens: no row would fill")
    rng = np.random.RandomState(seed)
    epochs: list[npt.NDArray[np.int64]] = []
    rows: list[tuple[int, int]] = []
    start = stop = filled = 0  # the row in the making: positions [start, stop), tokens so far
    while len(rows) <= num_samples:
        order = np.arange(len(documents), dtype=np.int64)
        rng.shuffle(order)
        epochs.append(documents[order])
        for length in lengths[order].tolist():
            if filled + length > row_length:
                if filled:
                    rows.append((start, stop))
                start, filled = stop, 0
            stop += 1
            if length > row_length:
                start = stop
            else:
                filled += length
    return {
        "sample_idx": np.array(rows, np.int64).reshape(-1, 2),
        "shuffle_idx": np.concatenate(epochs),
    }
