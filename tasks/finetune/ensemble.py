"""Several models' predictions of the same examples, joined into one. Pure.

Files are joined only when they have the same examples in the same order, with the same answers and
labels: anything else would give numbers that mean nothing.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import zip_longest

from megatron.errors import ConfigError, DataError
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.predictions import Prediction, Predictions, softmax


class Combine(StrEnum):
    """The quantity that is averaged over models."""

    PROBABILITIES = "probabilities"  # as Megatron does; of grades the grades
    SCORES = "scores"  # logits, before the softmax: a geometric mean of probabilities
    VOTES = "votes"  # one for each model's answer; equal votes go by mean probability


# What a probability adds to a share of votes: less than two shares differ by, unless by rounding.
_TIE = 1e-6


def check_alike(files: Sequence[Predictions], question: ClassificationQuestion) -> None:
    """Raise DataError with the first difference of a file from the first file."""
    first = files[0]
    for other in files:
        if other.task != first.task:
            raise _differ("tasks", f"{first.path}: {first.task}, {other.path}: {other.task}")
        if other.answers != question.answers:
            wanted = ", ".join(question.answers) or "none, as it is about grades"
            raise _differ(
                "answers",
                f"{other.path}: {', '.join(other.answers) or 'none'}; {other.task} has {wanted}",
            )
        if len(other.rows) != len(first.rows):
            counts = f"{first.path}: {len(first.rows)}, {other.path}: {len(other.rows)}"
            raise _differ("numbers of examples", counts)
        for number, (one_row, other_row) in enumerate(zip_longest(first.rows, other.rows), start=2):
            for what, one, two in _compared(one_row, other_row):
                if one != two:
                    lines = f"{first.path}:{number}: {one!r}, {other.path}:{number}: {two!r}"
                    raise _differ(what, lines)


def check_weights(weights: Sequence[float], files: Sequence[Predictions]) -> None:
    """Raise ConfigError unless there is one positive weight per file."""
    if len(weights) == len(files) and all(0 < weight < float("inf") for weight in weights):
        return
    raise ConfigError(
        "an ensemble needs a positive weight for each of its files",
        found=f"--weights {' '.join(f'{weight:g}' for weight in weights)} for {len(files)} files",
        fix=f"give {len(files)} positive numbers, or leave --weights out",
    )


def combined(
    files: Sequence[Predictions],
    question: ClassificationQuestion,
    *,
    combine: Combine = Combine.PROBABILITIES,
    weights: Sequence[float] | None = None,
) -> tuple[Prediction, ...]:
    """Return the predictions of all files as one; its scores are the averages.

    Args:
        weights: of each file, positive; equal when not given.

    Raises:
        ConfigError: grades are to be voted on.
    """
    if combine is Combine.VOTES and question.is_grade:
        raise ConfigError(
            "there are no votes on a grade",
            found=f"--combine votes for the task {files[0].task}",
            fix="use --combine scores, the mean grade",
        )
    given = list(weights or [1.0] * len(files))
    shares = [weight / sum(given) for weight in given]
    return tuple(
        _joined([file.rows[at] for file in files], shares, question, combine)
        for at in range(len(files[0].rows))
    )


def _joined(
    rows: Sequence[Prediction],
    shares: Sequence[float],
    question: ClassificationQuestion,
    combine: Combine,
) -> Prediction:
    if question.is_grade:
        return rows[0]._replace(scores=_mean([row.scores for row in rows], shares))
    probabilities = _mean([row.probabilities for row in rows], shares)
    if combine is Combine.PROBABILITIES:
        return rows[0]._replace(scores=probabilities, probabilities=probabilities)
    if combine is Combine.SCORES:
        scores = _mean([row.scores for row in rows], shares)
        return rows[0]._replace(scores=scores, probabilities=softmax(scores))
    votes = _mean([_vote(row) for row in rows], shares)
    weighed = [vote + _TIE * p for vote, p in zip(votes, probabilities)]
    return rows[0]._replace(
        scores=votes, probabilities=tuple(each / sum(weighed) for each in weighed)
    )


def _vote(row: Prediction) -> tuple[float, ...]:
    chosen = row.probabilities.index(max(row.probabilities))
    return tuple(float(at == chosen) for at in range(len(row.probabilities)))


def _mean(each: Sequence[Sequence[float]], shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(
        sum(share * value for share, value in zip(shares, values)) for values in zip(*each)
    )


def _compared(one_row: Prediction, other_row: Prediction) -> Iterator[tuple[str, object, object]]:
    yield "examples", one_row.uid, other_row.uid
    yield "texts of an example", one_row.digest, other_row.digest
    yield "labels", one_row.label, other_row.label
    yield "numbers of scores", len(one_row.scores), len(other_row.scores)


def _differ(what: str, found: str) -> DataError:
    return DataError(
        f"files of predictions are of different {what}",
        found=found,
        fix="give predictions of several models for the same --valid-data of the same task",
    )
