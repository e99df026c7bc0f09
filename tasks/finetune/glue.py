"""The nine tasks of GLUE (Wang et al. 2018), and SNLI: columns, labels and metrics, as a table.

Files are those that GLUE hands out: tab-separated, without quoting, most with a header; SNLI's are
JSON lines. A column or a label that is not as expected is an error with file and line.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron import log
from megatron.errors import DataError
from tasks.finetune.examples import ClassificationQuestion, Example, TextPair
from tasks.text_files import read_records, read_text

_NO_AGREEMENT = "-"  # the label of pairs of NLI that the annotators did not agree on


@dataclass(frozen=True)
class GlueTask:
    """The columns of a task's files, and its labels.

    Attributes:
        texts: names of the columns with the text, or the two texts; several spellings by "|".
        label: the column with the label.
        header: the names of the columns where files have none; chosen by their number.
    """

    question: ClassificationQuestion
    texts: tuple[str, ...]
    label: str
    uid: str | None = None
    header: tuple[str, ...] | None = None


_ENTAILMENT = ("entailment", "not_entailment")
_NLI = ("contradiction", "entailment", "neutral")  # Megatron-LM's order
_NUMBERS = ("0", "1")

TASKS: Mapping[str, GlueTask] = MappingProxyType(
    {
        "COLA": GlueTask(
            ClassificationQuestion(_NUMBERS, metrics=("matthews", "accuracy")),
            ("sentence",),
            "label",
            header=("source", "label", "star", "sentence"),
        ),
        "MNLI": GlueTask(
            ClassificationQuestion(_NLI), ("sentence1", "sentence2"), "gold_label", "index"
        ),
        "MRPC": GlueTask(
            ClassificationQuestion(_NUMBERS, metrics=("f1", "accuracy")),
            ("#1 String", "#2 String"),
            "Quality",
        ),
        "QNLI": GlueTask(
            ClassificationQuestion(_ENTAILMENT), ("question", "sentence"), "label", "index"
        ),
        "QQP": GlueTask(
            ClassificationQuestion(_NUMBERS, metrics=("f1", "accuracy")),
            ("question1", "question2"),
            "is_duplicate",
            "id",
        ),
        "RTE": GlueTask(
            ClassificationQuestion(_ENTAILMENT), ("sentence1", "sentence2"), "label", "index"
        ),
        "SNLI": GlueTask(
            ClassificationQuestion(_NLI), ("sentence1", "sentence2"), "gold_label", "pairID"
        ),
        "SST-2": GlueTask(ClassificationQuestion(_NUMBERS), ("sentence",), "label", "index"),
        "STS-B": GlueTask(
            ClassificationQuestion(metrics=("pearson", "spearman")),
            ("sentence1", "sentence2"),
            "score",
            "index",
        ),
        "WNLI": GlueTask(
            ClassificationQuestion(_NUMBERS), ("sentence1", "sentence2"), "label", "index"
        ),
    }
)


def read_glue(task: GlueTask, files: Sequence[str], *, needs_labels: bool = False) -> list[Example]:
    """Return the examples of some files, in order; raises DataError.

    Test files have no labels. Pairs of NLI without agreement are left out, and counted in the log.

    Args:
        needs_labels: a file without the column of labels is an error.
    """
    examples: list[Example] = []
    wanted = (*task.texts, task.label) if needs_labels else task.texts
    left_out = 0
    for name in files:
        for where, row in _rows(Path(name), task, wanted):
            if row.get(task.label) == _NO_AGREEMENT:
                left_out += 1
                continue
            examples.append(_example(task, where, row))
            if needs_labels and examples[-1].label is None:
                raise DataError(
                    "an example has no label, and training needs it",
                    found=f"{where}: nothing in {task.label}",
                    fix="leave the line out",
                )
    if left_out:
        log.info(f"{left_out} pairs that the annotators did not agree on are left out")
    if not examples:
        raise DataError("there is no example", found=", ".join(files), fix="check the files")
    return examples


def _rows(
    path: Path, task: GlueTask, wanted: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each line as values by column, with its file and line."""
    if path.suffix == ".jsonl":
        for where, fields in read_records([str(path)]):
            _check_columns(where, wanted, list(fields))
            yield where, fields
        return
    lines = read_text(path).split("\n")
    first = lines[0].rstrip("\r").split("\t")
    has_header = any(text in first for text in task.texts)
    names = first if has_header or task.header is None else list(task.header)
    _check_columns(str(path), wanted, names)
    for number, line in enumerate(lines[has_header or task.header is None :], start=1):
        if not line.strip():
            continue
        values = line.rstrip("\r").split("\t")
        where = f"{path}:{number + (has_header or task.header is None)}"
        if len(values) != len(names):
            raise DataError(
                "a line has another number of columns than the file's header",
                found=f"{where}: {len(values)} columns, wanted {len(names)}: {', '.join(names)}",
                fix="look for tabs inside a text, or a line that was cut",
            )
        yield where, dict(zip(names, values))


def _check_columns(where: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        near = [difflib.get_close_matches(name, names, n=1, cutoff=0.0) for name in missing]
        raise DataError(
            "a file lacks a column of its task",
            found=f"{where} has {', '.join(names)}; wanted {', '.join(missing)}; nearest: "
            + ", ".join(match[0] for match in near if match),
            fix="give the file as GLUE hands it out, or rename its columns; files of tests, which "
            "have no labels, can be judged with --epochs 0",
        )


def _example(task: GlueTask, where: str, row: Mapping[str, Any]) -> Example:
    texts = [str(row[name]).strip() for name in task.texts]
    empty = [name for name, text in zip(task.texts, texts) if not text]
    if empty:
        raise DataError(
            "an example has an empty text",
            found=f"{where}: nothing in column {empty[0]}",
            fix="leave the line out",
        )
    pair = TextPair(texts[0], texts[1] if len(texts) > 1 else None)
    uid = str(row.get(task.uid, where)) if task.uid is not None else where
    return Example(uid, (pair,), _label(task, where, row.get(task.label)))


def _label(task: GlueTask, where: str, value: object) -> float | None:
    if value is None:
        return None
    text, question = str(value), task.question
    if question.is_grade:
        return _grade(where, text, question.highest)
    if text not in question.labels:
        near = difflib.get_close_matches(text, question.labels, n=1, cutoff=0.0)
        raise DataError(
            "a label is not one of its task",
            found=f"{where}: {text!r}; wanted one of {', '.join(question.labels)}"
            + (f"; nearest: {near[0]}" if near else ""),
            fix="repair the line, or choose the task that the file is of",
        )
    return question.labels.index(text)


def _grade(where: str, text: str, highest: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= highest:
        raise DataError(
            "a grade is not a number of its task",
            found=f"{where}: {text!r}; wanted 0 to {highest:g}",
            fix="repair the line, or choose the task that the file is of",
        )
    return found
