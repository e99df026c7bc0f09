"""RACE (Lai et al. 2017): a passage, a question, and four answers of which one is right."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import DataError
from tasks.finetune.examples import ClassificationQuestion, Example, TextPair
from tasks.text_files import Record, parse_record, read_text

CHOICES = 4
QUESTION = ClassificationQuestion(num_choices=CHOICES)
_KEYS = ("article", "questions", "options", "answers")


def read_race(paths: Sequence[str], *, needs_labels: bool = False) -> list[Example]:
    """Return the questions of files, or of .txt and .json files in folders; raises DataError.

    A file is one JSON object, or several, one a line: article, questions, options, answers.

    Args:
        needs_labels: a passage without answers is an error.
    """
    examples = []
    for file in _files(paths):
        text = read_text(file)
        lines = text.split("\n") if _is_lines(text) else [text]
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = parse_record(line, f"{file}:{number}")
                examples += _questions(record, _KEYS if needs_labels else _KEYS[:3])
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
    """Return whether every line is a JSON object."""
    first = text.lstrip().split("\n", 1)[0]
    try:
        return isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _questions(record: Record, wanted: Sequence[str]) -> list[Example]:
    where, content = record
    missing = [key for key in wanted if key not in content]
    if missing:
        raise DataError(
            "a passage of RACE lacks a part",
            found=f"{where} has {', '.join(content)}; wanted {', '.join(missing)}",
            fix="give the files as RACE hands them out; those without answers can be judged with "
            "--epochs 0",
        )
    article, questions = record.text("article"), content["questions"]
    if not isinstance(questions, list) or not all(isinstance(each, str) for each in questions):
        raise record.wrong("questions", "a list of texts")
    for key in ("options", "answers"):
        listed = content.get(key, [""] * len(questions))
        if not isinstance(listed, list) or len(listed) != len(questions):
            raise record.wrong(key, f"a list with one entry for each of {len(questions)} questions")
    if not article.strip():
        raise _empty(where, "article")
    return [_example(record, article, at) for at in range(len(questions))]


def _example(record: Record, article: str, at: int) -> Example:
    where, content = record
    options, question = content["options"][at], content["questions"][at]
    if not isinstance(options, list) or len(options) != CHOICES:
        raise DataError(
            f"a question of RACE has not {CHOICES} answers",
            found=f"{where}, question {at}: {options}",
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
    questions = [_with_answer(question, str(option)) for option in options]
    if not all(text.strip() for text in questions):
        raise _empty(where, f"question {at}")
    return Example(f"{where}#{at}", tuple(TextPair(text, article) for text in questions), label)


def _empty(where: str, what: str) -> DataError:
    return DataError(
        "an example has an empty text", found=f"{where}: nothing in {what}", fix="leave it out"
    )


def _with_answer(question: str, option: str) -> str:
    """Return the question with the answer in its gap, or appended."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"
