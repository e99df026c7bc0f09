"""The nine tasks of GLUE (Wang et al. 2018), and SNLI: columns, labels and metrics, as a table.

Files are those that GLUE hands out: tab-separated, without quoting, most with a header; SNLI's are
JSON lines. A column or a label that is not as expected is an error with file and line.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megatron import log
from megatron.errors import DataError
from tasks.finetune.examples import Example, Pair, Question
from tasks.text_files import read_text

_NO_AGREEMENT = "-"  # the label of pairs of NLI that the annotators did not agree on


@dataclass(frozen=True)
class GlueTask:
    """Where a task's files have what, and what is decided.

    Attributes:
        texts: names of the columns with the text, or the two texts; several spellings by "|".
        label: the column with the label.
        header: the names of the columns where files have none; their number tells.
    """

    question: Question
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
            Question(_NUMBERS, metrics=("matthews", "accuracy")),
            ("sentence",),
            "label",
            header=("source", "label", "star", "sentence"),
        ),
        "MNLI": GlueTask(Question(_NLI), ("sentence1", "sentence2"), "gold_label", "index"),
        "MRPC": GlueTask(
            Question(_NUMBERS, metrics=("f1", "accuracy")), ("#1 String", "#2 String"), "Quality"
        ),
        "QNLI": GlueTask(Question(_ENTAILMENT), ("question", "sentence"), "label", "index"),
        "QQP": GlueTask(
            Question(_NUMBERS, metrics=("f1", "accuracy")),
            ("question1", "question2"),
            "is_duplicate",
            "id",
        ),
        "RTE": GlueTask(Question(_ENTAILMENT), ("sentence1", "sentence2"), "label", "index"),
        "SNLI": GlueTask(Question(_NLI), ("sentence1", "sentence2"), "gold_label", "pairID"),
        "SST-2": GlueTask(Question(_NUMBERS), ("sentence",), "label", "index"),
        "STS-B": GlueTask(
            Question(metrics=("pearson", "spearman")), ("sentence1", "sentence2"), "score", "index"
        ),
        "WNLI": GlueTask(Question(_NUMBERS), ("sentence1", "sentence2"), "label", "index"),
    }
)


def read_glue(task: GlueTask, files: Sequence[str]) -> list[Example]:
    """The examples of some files, in order; raises DataError.

    Test files have no labels. Pairs of NLI without agreement are left out, and counted in the log.
    """
    examples: list[Example] = []
    left_out = 0
    for name in files:
        for where, row in _rows(Path(name), task):
            if row.get(task.label) == _NO_AGREEMENT:
                left_out += 1
                continue
            examples.append(_example(task, where, row))
    if left_out:
        log.info(f"{left_out} pairs that the annotators did not agree on are left out")
    if not examples:
        raise DataError("there is no example", found=", ".join(files), fix="check the files")
    return examples


def _rows(path: Path, task: GlueTask) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each line as values by column, and where it stands."""
    lines = read_text(path).split("\n")
    if path.suffix == ".jsonl":
        yield from _json_rows(path, task, lines)
        return
    first = lines[0].rstrip("\r").split("\t")
    has_header = any(text in first for text in task.texts)
    names = first if has_header or task.header is None else list(task.header)
    _check_columns(path, task, names)
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


def _json_rows(
    path: Path, task: GlueTask, lines: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                "a line is not JSON", found=f"{path}:{number}: {error}", fix="repair the line"
            ) from None
        _check_columns(path, task, list(row))
        yield f"{path}:{number}", row


def _check_columns(path: Path, task: GlueTask, names: Sequence[str]) -> None:
    missing = [text for text in task.texts if text not in names]
    if missing:
        near = [difflib.get_close_matches(text, names, n=1, cutoff=0.0) for text in missing]
        raise DataError(
            "a file lacks a column of its task",
            found=f"{path} has {', '.join(names)}; wanted {', '.join(missing)}; nearest: "
            + ", ".join(match[0] for match in near if match),
            fix="give the file as GLUE hands it out, or rename its columns",
        )


def _example(task: GlueTask, where: str, row: Mapping[str, str]) -> Example:
    texts = [str(row[name]).strip() for name in task.texts]
    empty = [name for name, text in zip(task.texts, texts) if not text]
    if empty:
        raise DataError(
            "an example has an empty text",
            found=f"{where}: nothing in column {empty[0]}",
            fix="leave the line out",
        )
    pair = Pair(texts[0], texts[1] if len(texts) > 1 else None)
    uid = str(row.get(task.uid, where)) if task.uid is not None else where
    return Example(uid, (pair,), _label(task, where, row.get(task.label)))


def _label(task: GlueTask, where: str, text: str | None) -> float | None:
    if text is None:
        return None
    if task.question.is_grade:
        try:
            return float(text)
        except ValueError:
            raise DataError(
                "a grade is not a number", found=f"{where}: {text!r}", fix="repair the line"
            ) from None
    labels = task.question.labels
    if text not in labels:
        near = difflib.get_close_matches(text, labels, n=1, cutoff=0.0)
        raise DataError(
            "a label is not one of its task",
            found=f"{where}: {text!r}; wanted one of {', '.join(labels)}"
            + (f"; nearest: {near[0]}" if near else ""),
            fix="repair the line, or choose the task that the file is of",
        )
    return labels.index(text)
