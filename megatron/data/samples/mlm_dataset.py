"""Span corruption as in T5 v1.1: spans of a window are replaced by marks, and are the targets.

Every sample has the same two lengths, so nothing is padded; a sequence length that no raw length
gives exactly is refused with those that work. What a reader would get wrong: the windows are those
of a GPT order over `raw_length`, which is shorter than `seq_length` by the marks.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache, description_digest
from megatron.data.orders.sample_random import random_of_sample
from megatron.errors import ConfigError, DataError

_VERSION = 1  # of the draws below; part of the fingerprint
_SEARCH_RANGE = 4096  # how far above the given length a valid length is searched


class SpanLengths(NamedTuple):
    """The parts of every sample of one sequence length.

    A sample takes `raw_length + 1` tokens of text: the last is the one more that the targets have,
    so that inputs and targets together are `seq_length + 1`.
    """

    raw_length: int
    inputs: int  # kept tokens, a sentinel per span, one sep
    targets: int  # the same of the noise, without the one more
    spans: int

    @property
    def total(self) -> int:
        """The sequence length that these lengths fill exactly."""
        return self.inputs + self.targets

    @property
    def is_possible(self) -> bool:
        """Whether both kinds of tokens can be cut into `spans` parts that are not empty."""
        noise, kept = self.targets - self.spans - 1, self.inputs - self.spans - 1
        return 1 <= self.spans <= min(noise, kept)


def lengths_of(
    raw_length: int, *, noise_density: float, mean_noise_span_length: float
) -> SpanLengths:
    """Return the lengths that `raw_length` tokens give; rounds half to even, as T5 does."""
    noise = round(raw_length * noise_density)
    spans = round(noise / mean_noise_span_length)
    return SpanLengths(raw_length, raw_length - noise + spans + 1, noise + spans + 1, spans)


def span_lengths(
    seq_length: int, *, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> SpanLengths:
    """Return the lengths whose inputs and targets fill `seq_length` exactly.

    Raises ConfigError where there are none, naming the nearest sequence lengths that have.
    """
    return _exact_lengths(
        seq_length,
        lambda lengths: lengths.total,
        noise_density=noise_density,
        mean_noise_span_length=mean_noise_span_length,
    )


def span_lengths_of_inputs(
    inputs: int, *, noise_density: float = 0.15, mean_noise_span_length: float = 3.0
) -> SpanLengths:
    """Return the lengths whose inputs alone fill a sequence of `inputs` tokens exactly.

    Of several the longest, as in T5. Raises ConfigError as `span_lengths`.
    """
    return _exact_lengths(
        inputs,
        lambda lengths: lengths.inputs,
        noise_density=noise_density,
        mean_noise_span_length=mean_noise_span_length,
    )


def _exact_lengths(
    length: int,
    filled: Callable[[SpanLengths], int],
    *,
    noise_density: float,
    mean_noise_span_length: float,
) -> SpanLengths:
    """Return the lengths of the largest number of raw tokens that fill `length`, which grow."""
    if not 0 < noise_density < 1:
        raise ConfigError(
            "the share of tokens to replace is not between 0 and 1",
            found=f"--noise-density {noise_density}",
            fix="use 0.15, as T5 does",
        )
    if not 1 <= mean_noise_span_length < float("inf"):
        raise ConfigError(
            "a span to replace is shorter than one token",
            found=f"--mean-noise-span-length {mean_noise_span_length}",
            fix="use 3, as T5 does",
        )
    below: SpanLengths | None = None
    above: SpanLengths | None = None
    # Few of the tokens of a text may be kept, so that inputs are much shorter than it.
    for raw_length in range(1, ceil(length / (1 - noise_density)) + _SEARCH_RANGE):
        lengths = lengths_of(
            raw_length, noise_density=noise_density, mean_noise_span_length=mean_noise_span_length
        )
        if not lengths.is_possible:
            continue
        if filled(lengths) > length:
            above = lengths
            break
        below = lengths
    if below is not None and filled(below) == length:
        return below
    raise _inexact(length, [filled(found) for found in (below, above) if found is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCorruption:
    """How much of a window is replaced, and by which tokens.

    Attributes:
        sep: ends inputs and targets.
        sentinels: stand in the inputs for the spans, one each.
        noise_density: share of the tokens to replace.
    """

    sep: int | None
    sentinels: Sequence[int]
    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0

    def lengths(self, seq_length: int) -> SpanLengths:
        """Return the lengths that fill `seq_length` exactly; raises ConfigError without."""
        return span_lengths(
            seq_length,
            noise_density=self.noise_density,
            mean_noise_span_length=self.mean_noise_span_length,
        )

    def marks(self, spans: int) -> tuple[int, tuple[int, ...]]:
        """Return `sep` and as many sentinels as there are spans; raises ConfigError without."""
        return checked_marks(self.sep, self.sentinels, spans)


class MLMDataset:
    """Sample i is `{"input_tokens": int64 [inputs], "target_tokens": int64 [targets + 1]}`.

    Inputs: kept text with a sentinel in place of each span, then `sep`. Targets: each sentinel with
    the span it stands for, then `sep`. Together they have `seq_length + 1` tokens, the last only a
    label. Raises ConfigError for lengths that do not work out and DataError for an empty split.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        documents: DocumentSlice,
        *,
        corruption: SpanCorruption,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache: IndexCache,
        last_epoch_cutoff: float = 0.95,
    ) -> None:
        self.lengths = corruption.lengths(seq_length)
        self.sep, self.sentinels = corruption.marks(self.lengths.spans)
        self.name, self.seed = documents.name, seed
        self.windows = GPTDataset(
            indexed,
            name=documents.name,
            documents=np.arange(documents.start, documents.stop),
            num_samples=num_samples,
            seq_length=self.lengths.raw_length,
            seed=seed,
            cache=cache,
            last_epoch_cutoff=last_epoch_cutoff,
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1."""
        i = operator.index(index)
        text = self.windows[i]["text"]
        rng = random_of_sample(self.seed, i, use="mlm")
        inputs, targets = corrupt_spans(
            text, spans=self.lengths.spans, noise=self._noise, marks=self._marks, rng=rng
        )
        if (len(inputs), len(targets)) != (self.lengths.inputs, self.lengths.targets + 1):
            raise DataError(
                f"sample {i} of {self.name} has other lengths than the sequence length gives",
                found=f"{len(inputs)} inputs and {len(targets)} targets; expected "
                f"{self.lengths.inputs} and {self.lengths.targets + 1}",
                fix="remove the index cache and start again; report this if it comes back",
            )
        return {"input_tokens": inputs, "target_tokens": targets}

    def fingerprint(self) -> str:
        """Return 32 hex digits that change with the windows and every parameter."""
        return description_digest(
            {
                "order": f"mlm-{_VERSION}",
                "windows": self.windows.fingerprint(),
                "lengths": " ".join(map(str, self.lengths)),
                "marks": " ".join(map(str, self._marks)),
                "seed": self.seed,
            }
        )

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus was touched since it was opened."""
        self.windows.check_unchanged()

    @property
    def _noise(self) -> int:
        """Tokens of a window that are replaced; one more than of `raw_length` tokens."""
        return self.lengths.targets - self.lengths.spans

    @property
    def _marks(self) -> tuple[int, ...]:
        return (*self.sentinels, self.sep)


def corrupt_spans(
    text: npt.NDArray[np.int64],
    *,
    spans: int,
    noise: int,
    marks: Sequence[int],
    rng: np.random.RandomState,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (inputs, targets) of `text` with `noise` of its tokens replaced in `spans` spans.

    Kept and replaced spans alternate, kept first, and none is empty. `marks` are the sentinels of
    the spans and then the end of both sequences. Noise lengths are drawn first, as in T5.
    """
    replaced = random_parts(noise, spans, rng)
    kept = random_parts(len(text) - noise, spans, rng)
    borders = [0, *np.cumsum(np.stack([kept, replaced], axis=1)).tolist()]
    pieces = [text[start:stop] for start, stop in pairwise(borders)]
    *sentinels, end = ([mark] for mark in marks)
    inputs: list[npt.NDArray[np.int64] | list[int]] = []
    targets: list[npt.NDArray[np.int64] | list[int]] = []
    for keep, replace, sentinel in zip(pieces[::2], pieces[1::2], sentinels, strict=True):
        inputs += [keep, sentinel]
        targets += [sentinel, replace]
    return (
        np.concatenate([*inputs, end], dtype=np.int64),
        np.concatenate([*targets, end], dtype=np.int64),
    )


def random_parts(total: int, parts: int, rng: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Return `total` as a sum of `parts` positive numbers, each such sum equally likely."""
    is_border = np.arange(total - 1) < parts - 1
    rng.shuffle(is_border)
    borders = np.concatenate([[0], np.flatnonzero(is_border) + 1, [total]])
    lengths: npt.NDArray[np.int64] = borders[1:] - borders[:-1]
    return lengths


def checked_marks(
    sep: int | None, sentinels: Sequence[int], spans: int
) -> tuple[int, tuple[int, ...]]:
    """Return the end mark and a sentinel per span; raises ConfigError if one is missing."""
    if sep is None:
        raise ConfigError(
            "span corruption ends both sequences with a token that the tokenizer does not have",
            found="no sep id",
            fix="use a tokenizer with a sep or an end-of-document token",
        )
    if len(sentinels) < spans:
        raise ConfigError(
            "there are fewer sentinel tokens than spans to replace",
            found=f"{len(sentinels)} sentinels, {spans} spans",
            fix=f"use --vocab-extra-ids {spans} or more",
        )
    chosen = tuple(int(token) for token in sentinels[:spans])
    if len({*chosen, sep}) != spans + 1:
        raise ConfigError(
            "two marks of span corruption are one token",
            found=f"sep {sep}, sentinels {chosen}",
            fix="give each sentinel and sep an id of its own",
        )
    return sep, chosen


def _inexact(seq_length: int, near: Sequence[int]) -> ConfigError:
    return ConfigError(
        "no number of raw tokens fills the sequence length exactly with inputs and targets",
        found=f"--seq-length {seq_length}",
        fix=f"use --seq-length {' or '.join(map(str, near))}"
        if near
        else "use a --noise-density below 0.5, or a longer --mean-noise-span-length",
    )
