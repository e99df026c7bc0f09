"""Windows of text whose first tokens are a prefix, of the row or of each document in it.

What a reader would get wrong: a prefix is drawn from the seed and the number of the sample alone,
so that it is the same at every layout, in every worker and after a resume; Megatron-DeepSpeed draws
it from the state of the process that reads the batch.
"""

import operator
from typing import SupportsIndex

import numpy as np

from megatron.data.blendable_dataset import Sample, SampleDataset
from megatron.data.orders.index_cache import description_digest
from megatron.data.orders.sample_random import random_of_sample

_VERSION = 1  # of the draws below; part of the fingerprint


class PrefixDataset:
    """Sample i is that of `dataset`, `text`, int64 [s + 1], and `is_prefix`, int64 [s + 1].

    The length of a prefix of n tokens that a model reads is uniform in 0..n - 1, so that there
    always is something behind it. The last token of a row is only a label, and in no prefix.

    Args:
        eod: the token that ends documents, each of which has a prefix; None: each row has one.
    """

    def __init__(self, dataset: SampleDataset, *, eod: int | None, seed: int) -> None:
        self.dataset, self.eod, self.seed = dataset, eod, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index` of the dataset below, with its prefixes marked."""
        i = operator.index(index)
        sample = self.dataset[i]
        if sample.keys() != {"text"}:
            raise ValueError(f"samples with {sorted(sample)} are no plain windows of text")
        text = sample["text"]
        length = len(text) - 1
        ends: list[int] = []
        if self.eod is not None:
            ends = (np.flatnonzero(text[:length] == self.eod) + 1).tolist()
        starts = [0, *ends]
        rng = random_of_sample(self.seed, i, use="prefix")
        is_prefix = np.zeros(len(text), np.int64)
        for start, stop in zip(starts, [*ends, length], strict=True):
            if start < stop:
                is_prefix[start : start + rng.randint(stop - start)] = 1
        return {"text": text, "is_prefix": is_prefix}

    def fingerprint(self) -> str:
        """Return 32 hex digits that change with the dataset below and every parameter."""
        return description_digest(
            {
                "order": f"prefix-{_VERSION}",
                "of": self.dataset.fingerprint(),
                "eod": -1 if self.eod is None else self.eod,
                "seed": self.seed,
            }
        )

    def check_unchanged(self) -> None:
        """Raise DataError if a corpus below was touched since it was opened."""
        self.dataset.check_unchanged()
