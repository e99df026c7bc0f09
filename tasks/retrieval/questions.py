"""Files of questions: tables of questions and answers, and records with right and wrong blocks."""

import ast
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import DataError
from tasks.text_files import read_text


class Question(NamedTuple):
    """A question, and texts of which each is an answer."""

    text: str
    answers: tuple[str, ...]


class Passage(NamedTuple):
    """A block of text in a file of questions."""

    text: str
    title: str


class LabelledQuestion(NamedTuple):
    """A question, a block that answers it, and blocks that seem to and do not."""

    text: str
    right: Passage
    hard: tuple[Passage, ...]


def read_table(path: Path) -> list[Question]:
    """Return the lines `question <tab> ["answer", ..]` of Natural Questions as DPR writes them.

    Raises:
        DataError: the file cannot be read, or a line is something else.
    """
    lines = csv.reader(read_text(path).splitlines(), delimiter="\t")
    found = [_question(path, number, fields) for number, fields in enumerate(lines, 1)]
    if not found:
        raise DataError(
            "there are no questions", found=str(path), fix="give a file with a question a line"
        )
    return found


def read_labelled(paths: Sequence[str]) -> list[LabelledQuestion]:
    """Return the questions of DPR's JSON files that have a right block; others are left out.

    Raises:
        DataError: a file cannot be read or is something else, or no question has a right block.
    """
    found = [one for path in paths for one in _labelled(Path(path))]
    if not found:
        raise DataError(
            "no question has a block that answers it",
            found=", ".join(paths),
            fix="give files with positive_ctxs, as DPR's retriever data have them",
        )
    return found


def _question(path: Path, number: int, fields: Sequence[str]) -> Question:
    try:
        text, listed = fields
        answers = ast.literal_eval(listed)
        if not isinstance(answers, list) or not all(isinstance(one, str) for one in answers):
            raise ValueError(listed)
    except (ValueError, SyntaxError) as error:
        raise DataError(
            "a line is not a question and a list of answers",
            found=f"{path}, line {number}: {chr(9).join(fields)[:80]!r}",
            fix='write the question, a tab, and a list such as ["one answer", "another"]',
        ) from error
    return Question(text, tuple(answers))


def _labelled(path: Path) -> Iterator[LabelledQuestion]:
    try:
        records: Any = json.loads(read_text(path))
        for record in records:
            if record["positive_ctxs"]:
                hard = (_passage(one) for one in record.get("hard_negative_ctxs", ()))
                right = _passage(record["positive_ctxs"][0])
                yield LabelledQuestion(str(record["question"]), right, tuple(hard))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "a file is not a list of questions with their blocks",
            found=f"{path}: {type(error).__name__} {error}",
            fix='give JSON as DPR has it: [{"question": .., "positive_ctxs": [{"title": .., '
            '"text": ..}], "hard_negative_ctxs": [..]}, ..]',
        ) from error


def _passage(record: Mapping[str, Any]) -> Passage:
    return Passage(str(record["text"]), str(record["title"]))
