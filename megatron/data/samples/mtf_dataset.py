"""Pairs of an input and a target for multitask finetuning: two corpora, aligned by number.

`P_inputs_document` and `P_targets_document` are made by one run of tools/preprocess_data.py with
`--json-keys inputs targets`, which keeps or drops a row in both. What a reader would get wrong: for
two corpora without sidecars only equal numbers of items show that they are a pair.
"""

import operator
import os
from collections.abc import Callable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron.data.blendable_dataset import Sample
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import description_digest
from megatron.data.samples.packing import PackedDocument
from megatron.errors import DataError

PARTS = ("inputs", "targets")


class MTFDataset:
    """Item i is `{"input_tokens": int64 [m], "target_tokens": int64 [n]}` of pair i of `prefix`.

    Raises DataError when a corpus is missing or damaged, and when the two are no pair.
    """

    def __init__(
        self,
        prefix: str,
        *,
        open_corpus: Callable[[str], MMapIndexedDataset] = MMapIndexedDataset,
    ) -> None:
        self.prefix = prefix
        self.inputs, self.targets = (open_corpus(pair_prefix(prefix, part)) for part in PARTS)
        _require_pair(self.inputs, self.targets)
        self._lengths = self.inputs.sizes.astype(np.int64) + self.targets.sizes

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of input and target together, per pair."""
        return self._lengths

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return pair `index`; IndexError outside 0..len - 1."""
        i = operator.index(index)
        return {
            "input_tokens": self.inputs.get(i).astype(np.int64),
            "target_tokens": self.targets.get(i).astype(np.int64),
        }

    def document(self, number: int) -> PackedDocument:
        """Return pair `number` as one document: the input, then the target."""
        pair = self[number]
        is_input = np.repeat([True, False], [len(part) for part in pair.values()])
        return PackedDocument(np.concatenate(list(pair.values())), is_input)

    def fingerprint(self) -> str:
        """Return 32 hex digits that change when the sizes of either corpus do."""
        return description_digest(
            {"inputs": self.inputs.fingerprint(), "targets": self.targets.fingerprint()}
        )

    def check_unchanged(self) -> None:
        """Raise DataError if either corpus was touched since it was opened."""
        self.inputs.check_unchanged()
        self.targets.check_unchanged()


def pair_prefix(prefix: str | os.PathLike[str], part: str) -> str:
    """Return the prefix of the corpus that holds one of PARTS."""
    return f"{os.fspath(prefix)}_{part}_document"


def _require_pair(inputs: MMapIndexedDataset, targets: MMapIndexedDataset) -> None:
    fix = "make both in one run of tools/preprocess_data.py with --json-keys inputs targets"
    if len(inputs) != len(targets):
        raise DataError(
            "inputs and targets are not aligned: they have different numbers of documents",
            found=f"{len(inputs)} in {inputs.prefix}, {len(targets)} in {targets.prefix}",
            fix=fix,
        )
    for corpus in (inputs, targets):
        if len(corpus.doc_idx) - 1 != len(corpus):
            raise DataError(
                f"a document of {corpus.prefix} is not one item, so pairs cannot be matched",
                found=f"{len(corpus)} items in {len(corpus.doc_idx) - 1} documents",
                fix="preprocess it without --split-sentences",
            )
    tokenizers = [
        (corpus.metadata.tokenizer_type, corpus.metadata.vocab_size)
        for corpus in (inputs, targets)
        if corpus.metadata is not None
    ]
    if len(set(tokenizers)) > 1:
        raise DataError(
            "inputs and targets were made with different tokenizers",
            found=f"{tokenizers[0]} in {inputs.prefix}, {tokenizers[1]} in {targets.prefix}",
            fix=fix,
        )
