"""From examples to the rows of tokens that a BERT reads: [CLS] first [SEP] second [SEP], padded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.tokenizer.protocol import Tokenizer
from tasks.finetune.examples import Example, TextPair

UNKNOWN = -1.0  # the label of an example without one, and of what fills up a batch
_FEWEST = 8


class Rows(NamedTuple):
    """All examples of a file as tensors; c rows each (1 unless one of several rows is right)."""

    text: Tensor  # int64 [n, c, s]
    types: Tensor  # int64 [n, c, s]
    padding_mask: Tensor  # int64 [n, c, s], 1 for tokens
    labels: Tensor  # float64 [n]
    uids: tuple[str, ...]
    truncated: int  # rows that were too long

    def __len__(self) -> int:
        return len(self.uids)

    def take(self, which: Sequence[int], *, size: int) -> dict[str, Tensor]:
        """Return some examples, or none, as a batch of `size`, padded with rows of no weight."""
        chosen = torch.tensor([*which, *[0] * (size - len(which))])
        labels = self.labels[chosen].clone()
        labels[len(which) :] = UNKNOWN
        return {
            "text": self.text[chosen],
            "types": self.types[chosen],
            "padding_mask": self.padding_mask[chosen],
            "labels": labels,
        }


def make_rows(examples: Sequence[Example], tokenizer: Tokenizer, *, seq_length: int) -> Rows:
    """Tokenize and pad; rows that are too long are cut at the end, and counted."""
    special = (tokenizer.cls, tokenizer.sep, tokenizer.pad)
    if None in special:
        raise ConfigError(
            "the tokenizer lacks tokens that a BERT needs",
            found=f"[CLS] {special[0]}, [SEP] {special[1]}, [PAD] {special[2]}",
            fix="use --tokenizer-type BertWordPieceLowerCase with the model's vocabulary",
        )
    if seq_length < _FEWEST:
        raise ConfigError(
            "rows are too short to hold two texts",
            found=f"--seq-length {seq_length}",
            fix=f"use --seq-length {_FEWEST} or more",
        )
    encoded = [[_encoded(row, tokenizer, seq_length) for row in e.rows] for e in examples]
    text, types, mask = (
        torch.tensor([[row[part] for row in rows] for rows in encoded]) for part in range(3)
    )
    labels = [UNKNOWN if example.label is None else example.label for example in examples]
    return Rows(
        text,
        types,
        mask,
        torch.tensor(labels, dtype=torch.float64),
        tuple(example.uid for example in examples),
        sum(row[3] for rows in encoded for row in rows),
    )


def _encoded(
    row: TextPair, tokenizer: Tokenizer, seq_length: int
) -> tuple[list[int], list[int], list[int], bool]:
    """Return ids, types and padding mask of a row, and whether it was cut (Megatron-LM's rule)."""
    cls, sep, pad = tokenizer.cls, tokenizer.sep, tokenizer.pad
    assert cls is not None and sep is not None and pad is not None  # noqa: S101, PT018  # invariant: make_rows looked
    first = [cls, *tokenizer.tokenize(row.first), sep]
    second = [] if row.second is None else tokenizer.tokenize(row.second)
    ids, types = [*first, *second], [0] * len(first) + [1] * len(second)
    room = seq_length - (row.second is not None)
    is_cut = len(ids) > room
    ids, types = ids[:room], types[:room]
    if row.second is not None:
        ids, types = [*ids, sep], [*types, 1]
    elif is_cut:
        ids[-1] = sep
    filling = seq_length - len(ids)
    mask = [1] * len(ids) + [0] * filling
    return [*ids, *[pad] * filling], [*types, *[0] * filling], mask, is_cut
