"""Beam search over the scores of the next token, for one row by itself, without a model.

The search of transformers: 2 x `beams` candidates a step, of which the best `beams` may end and the
best unended ones go on. What a reader would get wrong: the length that divides a score counts the
end token, and a candidate behind the best `beams` ends nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from megatron.config.fields import raise_all
from megatron.errors import ConfigError


class EarlyStopping(StrEnum):
    """When the search of a row ends, beside its last possible token.

    Attributes:
        ALL_ENDED: as soon as as many sequences have ended as there are beams.
        HEURISTIC: when the best running sequence, at its length, is worse than all that ended.
        NEVER: when it is, at the length that favours it most, so that no better one is missed.
    """

    ALL_ENDED = "all-ended"
    HEURISTIC = "heuristic"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """The number of beams, and how sequences of different lengths compare.

    The score of a sequence is the sum of its log-probabilities over length ** `length_penalty`: 0
    compares sums, above 0 favours long sequences (Wu et al. 2016, arXiv 1609.08144, section 7).

    Raises:
        ConfigError: a value outside its range.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        if self.beams < 1:
            yield ConfigError(
                "the number of beams is not positive",
                found=f"--num-beams {self.beams}",
                fix="use 4, or leave it out",
            )
        if not math.isfinite(self.length_penalty):
            yield ConfigError(
                "the power of the length that divides scores is not a finite number",
                found=f"--length-penalty {self.length_penalty}",
                fix="use 1.0, or 0 to compare sums of log-probabilities",
            )


class Hypothesis(NamedTuple):
    """A sequence that ended: its new tokens with the end token, if any, and its score."""

    tokens: tuple[int, ...]
    score: float


class BeamStep(NamedTuple):
    """What each beam continues: a beam of the step before, and the token behind it."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]


class _Running(NamedTuple):
    tokens: tuple[int, ...]
    total: float  # of log-probabilities


class BeamSearch:
    """The search of one row.

    Attributes:
        ended: the best sequences that ended, best first.

    Raises:
        ConfigError: there are fewer tokens than candidates.
    """

    def __init__(
        self, params: BeamParams, *, max_new_tokens: int, eod: int | None, vocabulary: int
    ) -> None:
        if 2 * params.beams > vocabulary:
            raise ConfigError(
                "a step of beam search has more candidates than there are tokens",
                found=f"--num-beams {params.beams}, vocabulary of {vocabulary}",
                fix=f"use --num-beams {max(1, vocabulary // 2)} or fewer",
            )
        self._params, self._max_new_tokens, self._eod = params, max_new_tokens, eod
        self._running = [_Running((), 0.0)]
        self.ended: list[Hypothesis] = []

    def advance(self, log_probs: Tensor) -> BeamStep | None:
        """Take the log-probabilities [beams, v] behind each beam; return None when it is over.

        Before the first token all beams are one, and the first row is read.
        """
        beams = self._params.beams
        known = log_probs[: len(self._running)].float()
        scores = known + known.new_tensor([each.total for each in self._running])[:, None]
        best, places = scores.flatten().topk(2 * beams)
        going: list[tuple[int, _Running]] = []
        for rank, (total, place) in enumerate(zip(best.tolist(), places.tolist())):
            parent, token = divmod(place, log_probs.shape[-1])
            after = _Running((*self._running[parent].tokens, token), total)
            if token != self._eod and len(after.tokens) < self._max_new_tokens:
                going.append((parent, after))
            elif rank < beams:
                self._end(after)
        self._running = [after for _, after in going[:beams]]
        if self._is_over():
            return None
        return BeamStep(
            tuple(parent for parent, _ in going[:beams]),
            tuple(after.tokens[-1] for after in self._running),
        )

    def _end(self, sequence: _Running) -> None:
        length = len(sequence.tokens)
        score = sequence.total / math.pow(length, self._params.length_penalty)
        self.ended.append(Hypothesis(sequence.tokens, score))
        self.ended.sort(key=lambda each: -each.score)
        del self.ended[self._params.beams :]

    def _is_over(self) -> bool:
        """Return whether no running sequence can, or may, replace one that ended."""
        if not self._running:
            return True
        if len(self.ended) < self._params.beams:
            return False
        if self._params.early_stopping is EarlyStopping.ALL_ENDED:
            return True
        penalty, length = self._params.length_penalty, len(self._running[0].tokens)
        if self._params.early_stopping is EarlyStopping.NEVER and penalty > 0:
            length = self._max_new_tokens
        return self._running[0].total / math.pow(length, penalty) <= self.ended[-1].score
