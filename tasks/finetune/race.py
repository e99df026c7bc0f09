"""RACE (Lai et al. 2017): a passage, a question, and four answers of which one is right."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from tasks.finetune.examples import Example, Pair, Question
from tasks.text_files import read_text

CHOICES = 4
QUESTION = Question(num_choices=CHOICES)
_KEYS = ("article", "questions", "options", "answers")


def read_race(paths: Sequence[str]) -> list[Example]:
    """The questions of files, or of all .txt and .json files in folders; raises DataError.

    A file is one JSON object, or several, one a line: article, questions, options, answers.
    """
    examples = []
    for file in _files(paths):
        text = read_text(file)
        lines = text.splitlines() if _is_lines(text) else [text]
        for number, line in enumerate(lines, start=1):
            if line.strip():
                examples += _questions(f"{file}:{number}", line)
    if not examples:
        raise DataError("there is no question", found=", ".join(paths), fix="check the files")
    return examples


def _files(paths: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".json", ".jsonl"))
        else:
            found.append(path)
    return found


def _is_lines(text: str) -> bool:
    """Whether every line is an object of its own."""
    first = text.lstrip().split("\n", 1)[0]
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _questions(where: str, text: str) -> list[Example]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(
            "a file of RACE is not JSON", found=f"{where}: {error}", fix="give it as it was made"
        ) from None
    missing = [key for key in _KEYS[:3] if key not in content]
    if missing:
        raise DataError(
            "a passage of RACE lacks a part",
            found=f"{where} has {', '.join(content)}; wanted {', '.join(missing)}",
            fix="give the files as RACE hands them out",
        )
    return [_example(where, content, at) for at in range(len(content["questions"]))]


def _example(where: str, content: Mapping[str, Any], at: int) -> Example:
    options, question = content["options"][at], content["questions"][at]
    if len(options) != CHOICES:
        raise DataError(
            f"a question of RACE has not {CHOICES} answers",
            found=f"{where}, question {at}: {len(options)}",
            fix="leave the question out",
        )
    answers = content.get("answers")
    label = None
    if answers is not None:
        if answers[at] not in tuple("ABCD"):
            raise DataError(
                "a label is not one of its task",
                found=f"{where}, question {at}: {answers[at]!r}; wanted A, B, C or D",
                fix="repair the file",
            )
        label = "ABCD".index(answers[at])
    rows = tuple(Pair(_asked(question, option), content["article"]) for option in options)
    return Example(f"{where}#{at}", rows, label)


def _asked(question: str, option: str) -> str:
    """The answer put into the question's gap, or behind it."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"
