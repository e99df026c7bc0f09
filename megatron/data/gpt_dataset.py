"""Samples of `seq_length + 1` tokens cut from a stream of shuffled documents.

The order is Megatron's, bit for bit (docs/data.md): documents are shuffled, laid end to end, cut,
and the samples are shuffled again. What a reader would get wrong: the dataset has all samples of
its epochs, so it is usually longer than `num_samples`, and a document here is an item of the
corpus.
"""

import operator
from functools import partial
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import log
from megatron.data.corpus.metadata import ItemLevel
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache, description_digest
from megatron.data.orders.sample_maps import build_sample_idx
from megatron.errors import DataError

_ORDER_VERSION = 1  # of the recipe below; part of every cache key
_MOST_INT32 = np.iinfo(np.int32).max
_MOST_UINT32 = np.iinfo(np.uint32).max


class EpochPlan(NamedTuple):
    """How many passes over the documents a number of samples takes."""

    num_epochs: int
    tokens_per_epoch: int
    num_samples: int  # in all epochs together, at least as many as were asked for
    shuffled_apart_from: int  # samples from this one on are shuffled among themselves
    last_epoch_is_separate: bool


def plan_epochs(
    tokens_per_epoch: int, num_samples: int, *, seq_length: int, last_epoch_cutoff: float
) -> EpochPlan:
    """Return the fewest epochs that give `num_samples`, and whether the last is shuffled by itself.

    It is, if less than `last_epoch_cutoff` of its samples are needed: otherwise some documents
    would be seen one time more often than others. (Megatron-LM uses 0.95, some forks 0.80.)
    """
    # samples in E epochs = (E * tokens - 1) // seq_length, as neighbours share a token
    num_epochs = max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))
    total = (num_epochs * tokens_per_epoch - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    # A corpus of a few tokens may need more than one epoch's samples of its "last" epoch, because
    # samples span epochs; then nothing is gained by a separate one.
    separate = num_epochs > 1 and num_samples - before_last < int(last_epoch_cutoff * per_epoch)
    return EpochPlan(
        num_epochs, tokens_per_epoch, total, before_last if separate else total, separate
    )


def build_gpt_indices(
    sizes: npt.NDArray[np.int32],
    documents: npt.NDArray[np.integer],
    *,
    plan: EpochPlan,
    seq_length: int,
    seed: int,
) -> dict[str, npt.NDArray[np.integer]]:
    """Return the arrays `doc_idx`, `sample_idx` and `shuffle_idx` of an order.

    One RandomState draws for the documents first and the samples second.
    """
    rng = np.random.RandomState(seed)
    doc_idx = _document_order(documents, plan, rng)
    sample_idx = build_sample_idx(
        sizes,
        doc_idx,
        seq_length=seq_length,
        num_epochs=plan.num_epochs,
        tokens_per_epoch=plan.tokens_per_epoch,
    )
    return {
        "doc_idx": doc_idx,
        "sample_idx": sample_idx,
        "shuffle_idx": _sample_order(plan, rng),
    }


class GPTDataset:
    """Sample i is `{"text": int64 [seq_length + 1]}`; the last token is only a label.

    `documents` are the items of the corpus that this split may use. Raises DataError when they
    hold no token, and for a corpus of sentences.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        *,
        name: str,
        documents: npt.NDArray[np.integer],
        num_samples: int,
        seq_length: int,
        seed: int,
        cache: IndexCache,
        last_epoch_cutoff: float = 0.95,
    ) -> None:
        if num_samples < 1 or seq_length < 1:
            raise ValueError(f"num_samples {num_samples} and seq_length {seq_length}: 1 or more")
        self.indexed, self.name, self.seq_length = indexed, name, seq_length
        documents = _checked_documents(indexed, documents, name)
        _refuse_sentences(indexed)
        self.plan = plan_epochs(
            int(indexed.sizes[documents].sum(dtype=np.int64)),
            num_samples,
            seq_length=seq_length,
            last_epoch_cutoff=last_epoch_cutoff,
        )
        description: dict[str, str | int | float] = {
            "order": f"gpt-{_ORDER_VERSION}",
            "corpus": indexed.fingerprint(),
            "documents": xxhash.xxh3_128_hexdigest(documents.astype(np.int64).data),
            "seq_length": seq_length,
            "seed": seed,
            "num_epochs": self.plan.num_epochs,
            "shuffled_apart_from": self.plan.shuffled_apart_from,
        }
        self._fingerprint = description_digest(description)
        build = partial(
            build_gpt_indices,
            indexed.sizes,
            documents,
            plan=self.plan,
            seq_length=seq_length,
            seed=seed,
        )
        self._index = cache.load_or_build(name, description, build=build)
        log.debug(
            f"{name}: {len(self)} samples of {seq_length} tokens in {self.plan.num_epochs} "
            f"epochs of {self.plan.tokens_per_epoch} tokens from {indexed.prefix}"
        )

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: SupportsIndex) -> dict[str, npt.NDArray[np.int64]]:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        row = self._index["shuffle_idx"].item(i)
        (first, start), (last, stop) = self._index["sample_idx"][row : row + 2].tolist()
        documents = self._index["doc_idx"][first : last + 1]
        text = self.indexed.join(documents, start, stop + 1)
        if len(text) != self.seq_length + 1:
            raise DataError(
                f"sample {i} of {self.name} has another length than the sequence length",
                found=f"{len(text)} tokens; expected {self.seq_length + 1}",
                fix="remove the index cache and start again; report this if it comes back",
            )
        return {"text": text}

    @property
    def index_files(self) -> dict[str, str]:
        """The cache file behind each of doc_idx, sample_idx and shuffle_idx."""
        return {key: str(path) for key, path in self._index.files.items()}

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where corpus sizes and order are."""
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Raise DataError if the corpus was touched since it was opened."""
        self.indexed.check_unchanged()


def _document_order(
    documents: npt.NDArray[np.integer], plan: EpochPlan, rng: np.random.RandomState
) -> npt.NDArray[np.integer]:
    """Return the documents of all epochs in shuffled order; a separate last epoch by itself."""
    shuffled_together = plan.num_epochs - int(plan.last_epoch_is_separate)
    order = np.tile(documents, shuffled_together)
    rng.shuffle(order)
    if not plan.last_epoch_is_separate:
        return order
    last = documents.copy()
    rng.shuffle(last)
    return np.concatenate([order, last])


def _sample_order(plan: EpochPlan, rng: np.random.RandomState) -> npt.NDArray[np.integer]:
    order: npt.NDArray[np.integer]
    if plan.num_samples < _MOST_UINT32 - 1:
        order = np.arange(plan.num_samples, dtype=np.uint32)
    else:
        order = np.arange(plan.num_samples, dtype=np.int64)
    rng.shuffle(order[: plan.shuffled_apart_from])
    if plan.shuffled_apart_from < plan.num_samples:
        rng.shuffle(order[plan.shuffled_apart_from :])
    return order


def _checked_documents(
    indexed: MMapIndexedDataset, documents: npt.NDArray[np.integer], name: str
) -> npt.NDArray[np.integer]:
    """Return `documents` as int32, as Megatron stores them, or int64 for a larger corpus."""
    if len(documents) == 0:
        raise DataError(
            f"the {name} split of {indexed.prefix} has no documents",
            found=f"0 of {len(indexed)} documents",
            fix="give it a larger part with --split, or a corpus of its own",
        )
    if int(documents.min()) < 0 or int(documents.max()) >= len(indexed):
        raise ValueError(
            f"documents {documents.min()}..{documents.max()} of a corpus of {len(indexed)}"
        )
    if not indexed.sizes[documents].any():
        raise DataError(
            f"the {name} split of {indexed.prefix} has no tokens",
            found=f"{len(documents)} documents, all empty",
            fix="give it a larger part with --split, or preprocess the corpus again",
        )
    fits = len(indexed) <= _MOST_INT32
    return documents.astype(np.int32 if fits else np.int64)


def _refuse_sentences(indexed: MMapIndexedDataset) -> None:
    if indexed.metadata is not None and indexed.metadata.level == ItemLevel.SENTENCE:
        raise DataError(
            f"the corpus {indexed.prefix} is split into sentences, which a GPT order would shuffle",
            found='level "sentence" in its sidecar',
            fix="preprocess it without --split-sentences",
        )
    if indexed.metadata is None and len(indexed.doc_idx) - 1 < len(indexed):
        log.warning_once(
            f"sentences {indexed.prefix}",
            f"{indexed.prefix} has {len(indexed)} items in {len(indexed.doc_idx) - 1} documents: "
            "if it was split into sentences, they are shuffled apart",
        )
