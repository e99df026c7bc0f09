"""Questions with their right and wrong blocks as samples of a training, epoch after epoch."""

import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from megatron.data.blendable_dataset import Sample
from megatron.data.orders.index_cache import description_digest
from megatron.data.samples.masking import padded
from tasks.retrieval.questions import LabelledQuestion, Passage
from tools.retrieval.evidence import RowMaker


class QuestionDataset:
    """Samples of a question [s] and `1 + hard` blocks [1 + hard, s], of which the first is right.

    Each epoch has an order of its own, and its own choice of wrong blocks, both functions of the
    seed; a question with fewer wrong blocks than are asked for takes right blocks of others.

    Args:
        hard: wrong blocks of each question.
        num_samples: length; None: once through, in the order of the file.
    """

    def __init__(
        self,
        questions: Sequence[LabelledQuestion],
        rows: RowMaker,
        *,
        hard: int,
        seed: int,
        num_samples: int | None = None,
    ) -> None:
        self._questions, self._rows, self._hard, self._seed = questions, rows, hard, seed
        self._is_shuffled = num_samples is not None
        self._length = len(questions) if num_samples is None else num_samples
        self._order: tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.int64]]] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1."""
        at = operator.index(index)
        if not 0 <= at < self._length:
            raise IndexError(f"sample {at} of {self._length}")
        question = self._questions[self.place_of(at)]
        blocks = [question.right, *self._wrong(question, at)]
        rows = [self._rows.row(one.text, one.title) for one in blocks]
        asked = self._rows.row(question.text)
        return {
            "query_tokens": self._padded(asked),
            "query_pad_mask": self._mask(asked),
            "context_tokens": np.stack([self._padded(row) for row in rows]),
            "context_pad_mask": np.stack([self._mask(row) for row in rows]),
        }

    def place_of(self, at: int) -> int:
        """Return which question sample `at` is of."""
        if not self._is_shuffled:
            return at
        epoch, place = divmod(at, len(self._questions))
        if self._order is None or self._order[0] != epoch:
            drawn = np.random.RandomState((self._seed + epoch) % 2**32)
            self._order = (epoch, drawn.permutation(len(self._questions)))
        return int(self._order[1][place])

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where the samples are."""
        return description_digest(
            {
                "questions": repr(list(self._questions)),
                "hard": self._hard,
                "seed": self._seed,
                "length": self._length,
                "seq_length": self._rows.seq_length,
            }
        )

    def check_unchanged(self) -> None:
        """Do nothing: all questions are in memory."""

    def _wrong(self, question: LabelledQuestion, at: int) -> list[Passage]:
        drawn = np.random.RandomState((self._seed + at) % 2**32)
        few = [*question.hard]
        chosen = [few[i] for i in drawn.permutation(len(few))[: self._hard]]
        while len(chosen) < self._hard:
            chosen.append(self._questions[int(drawn.randint(len(self._questions)))].right)
        return chosen

    def _padded(self, row: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return padded(list(row), self._rows.seq_length, self._rows.vocabulary.pad)

    def _mask(self, row: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return padded([1] * len(row), self._rows.seq_length, 0)
