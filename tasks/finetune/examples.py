"""What a task is about: examples of one or several rows, and how their scores are judged."""

from dataclasses import dataclass
from typing import NamedTuple


class Pair(NamedTuple):
    """One row that a model reads: a text, or two."""

    first: str
    second: str | None = None


class Example(NamedTuple):
    """One thing to decide: a row, or several of which one is right."""

    uid: str  # as the file names it, else file and line
    rows: tuple[Pair, ...]
    label: float | None  # a class or the right row, by number; a grade; None: not known


@dataclass(frozen=True)
class Question:
    """What is decided about each example.

    Attributes:
        labels: the classes by name, in the order of their numbers; none for grades and choices.
        num_choices: rows of an example, one of which is right; 1: the classes are of one row.
        metrics: names of `metrics.METRICS`; the first one decides which model is the best.
    """

    labels: tuple[str, ...] = ()
    num_choices: int = 1
    metrics: tuple[str, ...] = ("accuracy",)

    @property
    def is_grade(self) -> bool:
        """Whether a number is wanted, not one of several."""
        return not self.labels and self.num_choices == 1

    @property
    def num_scores(self) -> int:
        """Scores that the model gives to a row."""
        return max(len(self.labels), 1)
