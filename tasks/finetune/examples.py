"""What a task is about: examples of one or several rows, and how their scores are judged."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

_CHOICES = "ABCDEFGH"


class TextPair(NamedTuple):
    """One row of the model's input: a text, or two."""

    first: str
    second: str | None = None


class Example(NamedTuple):
    """One example: a row, or several rows of which one is right."""

    uid: str  # as the file names it, else file and line
    rows: tuple[TextPair, ...]
    label: float | None  # a class or the right row, by number; a grade; None: not known

    @property
    def digest(self) -> str:
        """Return sixteen hex digits that differ between examples of different texts."""
        texts = "\x1e".join("\x1f".join(text or "" for text in row) for row in self.rows)
        return hashlib.sha256(texts.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ClassificationQuestion:
    """The task of a classifier: its rows and its labels.

    Attributes:
        labels: the classes by name, in the order of their numbers; none for grades and choices.
        num_choices: rows of an example, one of which is right; 1: the classes are of one row.
        metrics: names of `metrics.METRICS`; the first one decides which model is the best.
        highest: of grades, which begin at 0.
    """

    labels: tuple[str, ...] = ()
    num_choices: int = 1
    metrics: tuple[str, ...] = ("accuracy",)
    highest: float = 5.0

    @property
    def is_grade(self) -> bool:
        """Whether the label is a number, not one of several classes."""
        return not self.labels and self.num_choices == 1

    @property
    def num_scores(self) -> int:
        """Number of scores of a row."""
        return max(len(self.labels), 1)

    @property
    def answers(self) -> tuple[str, ...]:
        """The names of the possible decisions; empty for a grade."""
        return () if self.is_grade else self.labels or tuple(_CHOICES[: self.num_choices])

    def spelled(self, decision: float) -> str:
        """Return a decision or a label as it is written in files."""
        return f"{decision:.9g}" if self.is_grade else self.answers[int(decision)]
