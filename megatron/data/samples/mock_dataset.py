"""Samples that are made up instead of read, for measurements and trials without a corpus.

As in Megatron-LM, the tokens of a document count 1, 2, 3, ... up to its end: a model that learns
anything learns this within a few steps. Sample i is computed from i alone, so there is no order to
build and nothing to keep on disk, however many samples a run asks for.
"""

import operator
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron.data.orders.index_cache import description_digest

_VERSION = 1  # of the recipe below


@dataclass(frozen=True, slots=True, kw_only=True)
class MockDataset:
    """Sample i is `{"text": int64 [seq_length + 1]}`: documents one after the other.

    The length of each is drawn from 1 to seq_length + 1 tokens, its end included. As in windows of
    a text, the first and the last may be cut. `name` is that of the split: others have other
    samples.
    """

    name: str
    num_samples: int
    seq_length: int
    seed: int
    vocab_size: int  # documents that are longer count from 0 again
    eod: int | None  # the last token of a document, where the vocabulary has such a token

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: SupportsIndex) -> dict[str, npt.NDArray[np.int64]]:
        """Return sample `index`; IndexError outside 0..len - 1."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        wanted = self.seq_length + 1
        rng = np.random.default_rng((self.seed, i, *self.name.encode()))
        first = int(rng.integers(wanted))  # tokens of the documents before the sample begins
        documents: list[npt.NDArray[np.int64]] = []
        filled = 0
        while filled < first + wanted:
            length = int(rng.integers(1, wanted, endpoint=True))
            document = np.arange(1, length + 1, dtype=np.int64) % self.vocab_size
            if self.eod is not None:
                document[-1] = self.eod
            documents.append(document)
            filled += length
        return {"text": np.concatenate(documents)[first : first + wanted]}

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where all samples are."""
        return description_digest(
            {
                "order": f"mock-{_VERSION}",
                "name": self.name,
                "num_samples": self.num_samples,
                "seq_length": self.seq_length,
                "seed": self.seed,
                "vocab_size": self.vocab_size,
                "eod": -1 if self.eod is None else self.eod,
            }
        )

    def check_unchanged(self) -> None:
        """Do nothing: there are no files."""
