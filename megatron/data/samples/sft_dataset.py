"""Dialogues for supervised finetuning: a corpus of tokens, one of loss masks, and packed rows.

`P_tokens_document` and `P_mask_document` are made together by `SFTCorpusBuilder`, behind
tools/preprocess_sft.py; mask k is 1 where token k is to be learned. What a reader would get wrong:
dialogues are never split over rows, so a policy decides about one that is longer than a row.
"""

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron.config.data import OnTooLong
from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.data.orders.index_cache import description_digest
from megatron.data.samples.chat_template import EncodedDialogue
from megatron.data.samples.packing import PackedDataset, PackedDocument
from megatron.errors import DataError

PARTS = ("tokens", "mask")
_MASK_TYPE = np.dtype(np.uint8)


class SFTCorpus:
    """Dialogue i as tokens and mask; raises DataError when the two corpora are no pair."""

    def __init__(
        self,
        prefix: str,
        *,
        open_corpus: Callable[[str], MMapIndexedDataset] = MMapIndexedDataset,
    ) -> None:
        self.prefix = prefix
        self.tokens, self.mask = (open_corpus(part_prefix(prefix, part)) for part in PARTS)
        if self.mask.dtype != _MASK_TYPE:
            raise DataError(
                f"{self.mask.prefix} is no corpus of loss masks",
                found=f"{self.mask.dtype.name} where {_MASK_TYPE.name} should be",
                fix="make tokens and mask together with tools/preprocess_sft.py",
            )
        if not np.array_equal(self.tokens.sizes, self.mask.sizes):
            raise DataError(
                f"tokens and masks of {prefix} are not of the same dialogues",
                found=f"{len(self.tokens)} dialogues with {self.tokens.num_tokens} tokens, "
                f"{len(self.mask)} masks with {self.mask.num_tokens}",
                fix="make tokens and mask together with tools/preprocess_sft.py",
            )
        self._lengths = self.tokens.sizes.astype(np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each dialogue."""
        return self._lengths

    def __len__(self) -> int:
        return len(self.tokens)

    def document(self, number: int) -> PackedDocument:
        """Return dialogue `number`; DataError if its mask holds something else than 0 and 1."""
        mask = self.mask.get(number)
        if len(mask) and int(mask.max()) > 1:
            raise DataError(
                f"{self.mask.prefix} is no corpus of loss masks",
                found=f"{mask.max()} in item {number}, where 0 or 1 should be",
                fix="make tokens and mask together with tools/preprocess_sft.py",
            )
        return PackedDocument(self.tokens.get(number), mask == 0)

    def fingerprint(self) -> str:
        """Return 32 hex digits that change when the sizes of the dialogues do."""
        return description_digest({part: getattr(self, part).fingerprint() for part in PARTS})

    def check_unchanged(self) -> None:
        """Raise DataError if either corpus was touched since it was opened."""
        self.tokens.check_unchanged()
        self.mask.check_unchanged()


class SFTDataset(PackedDataset):
    """Rows of whole dialogues, as `PackedDataset` gives them; refused by default when too long.

    With `OnTooLong.CUT` a dialogue keeps its beginning, which may hold nothing to learn.
    """

    source: SFTCorpus
    when_too_long = OnTooLong.ERROR


class SFTCorpusBuilder:
    """Writes the two corpora of `prefix` side by side; both appear, or neither.

    `metadata` describes the tokens. Use it as a context manager.
    """

    def __init__(self, prefix: str, dtype: npt.DTypeLike, *, metadata: CorpusMetadata) -> None:
        self.prefix = prefix
        self.num_dialogues = self.num_tokens = self.num_targets = 0
        about_mask = CorpusMetadata(
            tokenizer_type=metadata.tokenizer_type, vocab_size=2, eod=None, json_key="mask"
        )
        self._tokens = MMapIndexedDatasetBuilder(
            part_prefix(prefix, "tokens"), dtype, metadata=metadata
        )
        self._mask = MMapIndexedDatasetBuilder(
            part_prefix(prefix, "mask"), _MASK_TYPE, metadata=about_mask
        )

    def __enter__(self) -> Self:
        self._tokens.__enter__()
        self._mask.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The tokens come last: a corpus is found by them.
        try:
            self._mask.__exit__(kind, error, trace)
        except BaseException as failure:
            self._tokens.__exit__(type(failure), failure, failure.__traceback__)
            raise
        try:
            self._tokens.__exit__(kind, error, trace)
        except BaseException:
            for path in corpus_files(self._mask.prefix):
                path.unlink(missing_ok=True)
            raise

    def add(self, dialogue: EncodedDialogue) -> None:
        """Append one dialogue."""
        tokens, mask = dialogue
        if len(tokens) != len(mask) or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"{len(tokens)} tokens with a mask of {len(mask)}, each 0 or 1")
        for builder, items in ((self._tokens, tokens), (self._mask, mask)):
            builder.add_document(items)
        self.num_dialogues += 1
        self.num_tokens += len(tokens)
        self.num_targets += int(mask.sum())


def part_prefix(prefix: str | os.PathLike[str], part: str) -> str:
    """Return the prefix of the corpus that holds one of PARTS."""
    return f"{os.fspath(prefix)}_{part}_document"
