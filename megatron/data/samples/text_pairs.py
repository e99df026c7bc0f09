"""Pairs of an input and a target for a model with an encoder and a decoder: one pair a row.

What a reader would get wrong: a pair fits if each of its parts fits into the row of its stack, and
both parts count the end token that is put behind them where the corpus has none.
"""

import operator
from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import log
from megatron.config.data import OnTooLong
from megatron.data.blendable_dataset import Sample
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache, description_digest
from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.data.samples.masking import padded
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.errors import DataError

_ORDER_VERSION = 1  # of the recipe below; part of every cache key


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecipe:
    """The rows of both stacks, the tokens that frame them, and what becomes of longer pairs."""

    marks: DecoderMarks
    seq_length: int
    decoder_seq_length: int
    seed: int
    on_too_long: OnTooLong = OnTooLong.SKIP


class TextPairs:
    """Sample i has int64 `text_enc` and `padding_mask` [s], and those of the decoder [d].

    The latter are `text_dec`, `labels`, which are -1 in padding, and `loss_mask`. Raises DataError
    for a split without a pair that fits, and for longer pairs where the recipe says so.
    """

    def __init__(
        self,
        source: MTFDataset,
        documents: DocumentSlice,
        *,
        recipe: PairRecipe,
        num_samples: int,
        cache: IndexCache,
    ) -> None:
        self.source, self.name, self.recipe = source, documents.name, recipe
        pairs = self._fitting(np.arange(documents.start, documents.stop, dtype=np.int64))
        self._description: dict[str, str | int | float] = {
            "order": f"pairs-{_ORDER_VERSION}",
            "corpus": source.fingerprint(),
            "pairs": xxhash.xxh3_128_hexdigest(pairs.data),
            "seed": recipe.seed,
            "num_samples": num_samples,
        }
        self._per_epoch = len(pairs)
        build = partial(shuffled_epochs, pairs, num_samples=num_samples, seed=recipe.seed)
        self._index = cache.load_or_build(self.name, self._description, build=build)

    def __len__(self) -> int:
        return len(self._index["pair_idx"])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        pair = self.source[int(self._index["pair_idx"][i])]
        marks = self.recipe.marks
        inputs, targets = (
            marks.ended(pair[part].tolist()) for part in ("input_tokens", "target_tokens")
        )
        columns, rows = self.recipe.seq_length, self.recipe.decoder_seq_length
        return {
            "text_enc": padded(inputs, columns, marks.pad),
            "padding_mask": padded([1] * len(inputs), columns, 0),
            "text_dec": padded([marks.start, *targets[:-1]], rows, marks.pad),
            "labels": padded(targets, rows, -1),
            "loss_mask": padded([1] * len(targets), rows, 0),
        }

    def epochs(self, samples: int) -> float:
        """Return passes over the pairs that the first `samples` samples are."""
        return samples / self._per_epoch

    @property
    def index_files(self) -> dict[str, str]:
        """The cache file of pair_idx."""
        return {key: str(path) for key, path in self._index.files.items()}

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes, order and rows are."""
        recipe = self.recipe
        rows = f"{recipe.seq_length} {recipe.decoder_seq_length} {recipe.marks}"
        return description_digest({**self._description, "rows": rows})

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus was touched since it was opened."""
        self.source.check_unchanged()

    def _fitting(self, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the pairs that fit into their rows, with a note of the others."""
        prefix, recipe = self.source.prefix, self.recipe
        if len(pairs) == 0:
            raise DataError(
                f"the {self.name} split of {prefix} is empty",
                found=f"0 of {len(self.source)} pairs",
                fix="give it a larger part with --split, or a corpus of its own",
            )
        inputs, targets = (
            part.sizes[pairs] + (0 if self._has_ends(part) else 1)
            for part in (self.source.inputs, self.source.targets)
        )
        fits = (inputs <= recipe.seq_length) & (targets <= recipe.decoder_seq_length)
        left = int(len(pairs) - fits.sum())
        if not left:
            return pairs
        found = (
            f"{left} of {len(pairs)}; the longest input has {inputs.max()} tokens, the longest "
            f"target {targets.max()}, with the end token; rows hold {recipe.seq_length} and "
            f"{recipe.decoder_seq_length}"
        )
        if recipe.on_too_long is OnTooLong.ERROR or left == len(pairs):
            raise DataError(
                f"{'all' if left == len(pairs) else 'some'} pairs of the {self.name} split of "
                f"{prefix} are longer than a row",
                found=found,
                fix=f"use --seq-length {inputs.max()} --decoder-seq-length {targets.max()}, or "
                "--on-too-long-document skip",
            )
        log.warning(f"{self.name} split of {prefix}: longer than a row and left out: {found}")
        return pairs[fits]

    def _has_ends(self, corpus: MMapIndexedDataset) -> bool:
        """Return whether each text ends with the end token, as its sidecar says."""
        return corpus.metadata is not None and corpus.metadata.eod == self.recipe.marks.end


def shuffled_epochs(
    pairs: npt.NDArray[np.int64], *, num_samples: int, seed: int
) -> dict[str, npt.NDArray[np.integer]]:
    """Return `pair_idx` int64: whole epochs of all pairs, `num_samples` or more of them.

    Each epoch shuffles them with one RandomState.
    """
    rng = np.random.RandomState(seed)
    epochs = []
    for _ in range(-(-num_samples // len(pairs))):
        order = pairs.copy()
        rng.shuffle(order)
        epochs.append(order)
    return {"pair_idx": np.concatenate(epochs)}
