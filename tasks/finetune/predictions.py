"""Files of predictions: one line for each example, with what is needed to compare and join them.

Columns are separated by tabs: `uid`, `prediction`, `scores` (of the model, by spaces), `label`
(empty where not known), `task`, `file`, `digest` of the texts, and for each possible answer its
probability, `p(ANSWER)`. Grades have no probabilities.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.errors import DataError
from tasks.finetune.examples import ClassificationQuestion, Example
from tasks.text_files import read_text

_FIXED = ("uid", "prediction", "scores", "label", "task", "file", "digest")
_SUMS_TO_ONE = 1e-4  # probabilities are written with nine digits, of up to eight answers


class Prediction(NamedTuple):
    """The decision of a model about one example."""

    uid: str
    digest: str
    file: str
    label: str  # as files show it; empty where not known
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]  # of each answer; none of a grade


class Predictions(NamedTuple):
    """A file of predictions."""

    path: str
    task: str
    answers: tuple[str, ...]
    rows: tuple[Prediction, ...]


def prediction_of(
    question: ClassificationQuestion, example: Example, scores: Sequence[float], file: str
) -> Prediction:
    """Return the prediction for an example of `file` from its scores."""
    label = "" if example.label is None else question.spelled(example.label)
    probabilities = () if question.is_grade else softmax(scores)
    uid = " ".join(example.uid.split())  # a tab would begin another column
    return Prediction(uid, example.digest, file, label, tuple(scores), probabilities)


def softmax(scores: Sequence[float]) -> tuple[float, ...]:
    """Return the probabilities of alternatives with these logits."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return tuple(weight / sum(weights) for weight in weights)


def decision_of(question: ClassificationQuestion, row: Prediction) -> float:
    """Return the index of the answer, or the grade."""
    if question.is_grade:
        return row.scores[0]
    return float(max(range(len(row.probabilities)), key=row.probabilities.__getitem__))


def written(task: str, question: ClassificationQuestion, rows: Sequence[Prediction]) -> str:
    """Return the text of a file of predictions."""
    lines = ["\t".join([*_FIXED, *(f"p({answer})" for answer in question.answers)])]
    for row in rows:
        decision = question.spelled(decision_of(question, row))
        scores = " ".join(f"{score:.9g}" for score in row.scores)
        fixed = [row.uid, decision, scores, row.label, task, row.file, row.digest]
        lines.append("\t".join([*fixed, *(f"{p:.9g}" for p in row.probabilities)]))
    return "\n".join(lines) + "\n"


def read_predictions(path: Path) -> Predictions:
    """Return the content of a file of predictions; DataError for any other file."""
    header, *lines = read_text(path).rstrip("\n").split("\n")
    names = header.split("\t")
    fixed, answers = tuple(names[: len(_FIXED)]), names[len(_FIXED) :]
    if fixed != _FIXED or not all(n.startswith("p(") and n.endswith(")") for n in answers):
        raise DataError(
            "a file is not one of predictions",
            found=f"{path} begins with the columns {', '.join(names[:8])}; wanted "
            f"{', '.join(_FIXED)}, and p(ANSWER) for each answer",
            fix="give files that fine-tuning wrote with --predictions",
        )
    rows = list(_rows(path, lines, len(names)))
    if not rows:
        raise DataError(
            "a file of predictions holds none", found=str(path), fix="judge its examples again"
        )
    tasks = sorted({task for task, _ in rows})
    if len(tasks) > 1:
        raise DataError(
            "a file holds predictions of several tasks",
            found=f"{path}: {', '.join(tasks)}",
            fix="keep the predictions of each task in a file of their own",
        )
    return Predictions(
        str(path), tasks[0], tuple(name[2:-1] for name in answers), tuple(row for _, row in rows)
    )


def _rows(path: Path, lines: Sequence[str], columns: int) -> Iterator[tuple[str, Prediction]]:
    """Yield the task and the prediction of each line."""
    for number, line in enumerate(lines, start=2):
        values = line.split("\t")
        where = f"{path}:{number}"
        if len(values) != columns:
            raise DataError(
                "a line of a file of predictions has another number of columns than its header",
                found=f"{where}: {len(values)} columns, wanted {columns}",
                fix="look for a line that was cut, or judge its examples again",
            )
        uid, _, scores, label, task, file, digest, *rest = values
        numbers = _numbers(where, scores.split())
        probabilities = _numbers(where, rest)
        is_whole = (
            abs(sum(probabilities) - 1) <= _SUMS_TO_ONE and min(probabilities, default=0) >= 0
        )
        if rest and not is_whole:
            raise DataError(
                "probabilities of the answers are not some of one whole",
                found=f"{where}: {', '.join(rest)}",
                fix="judge its examples again",
            )
        yield task, Prediction(uid, digest, file, label, numbers, probabilities)


def _numbers(where: str, words: Sequence[str]) -> tuple[float, ...]:
    try:
        found = tuple(map(float, words))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise DataError(
            "a prediction is not a number",
            found=f"{where}: {' '.join(words)}",
            fix="judge its examples again, with a model whose weights are finite",
        )
    return found
