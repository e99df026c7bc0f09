"""Files of questions, and what of them is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from tasks.retrieval.questions import (
    LabelledQuestion,
    Passage,
    Question,
    read_labelled,
    read_table,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def record(question: str, **blocks: list[str]) -> dict[str, Any]:
    """A record of DPR; blocks by their key, each with a title of its own."""
    listed = {
        key: [{"title": f"of {text}", "text": text, "score": 1} for text in texts]
        for key, texts in blocks.items()
    }
    return {"question": question, "answers": ["a"], **listed}


def test_a_table_has_a_question_and_answers_in_each_line(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.csv", "who?\t['Ahab', \"the captain's\"]\nwhen?\t['1851']\n")
    assert read_table(path) == [
        Question("who?", ("Ahab", "the captain's")),
        Question("when?", ("1851",)),
    ]


@pytest.mark.parametrize(
    "line",
    ["who?", "who?\tAhab", "who?\t['Ahab'", "who?\t[1]", "a\tb\tc", "who?\t__import__('os')"],
)
def test_a_line_that_is_something_else_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match="not a question and a list of answers") as caught:
        read_table(write(tmp_path / "qa.csv", f"who?\t['a']\n{line}\n"))
    assert "line 2" in caught.value.found


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no questions"):
        read_table(write(tmp_path / "qa.csv", ""))


def test_records_without_a_right_block_are_left_out(tmp_path: Path) -> None:
    rows = [
        record("q1", positive_ctxs=["r1", "r2"], hard_negative_ctxs=["h1"], negative_ctxs=["n"]),
        record("q2", positive_ctxs=[]),
        record("q3", positive_ctxs=["r3"]),
    ]
    path = write(tmp_path / "dpr.json", json.dumps(rows))
    right, hard = Passage("r1", "of r1"), Passage("h1", "of h1")
    assert read_labelled([str(path)]) == [
        LabelledQuestion("q1", right, (hard,)),
        LabelledQuestion("q3", Passage("r3", "of r3"), ()),
    ]


@pytest.mark.parametrize("content", ["{", "3", '[{"question": "q"}]', '[{"positive_ctxs": [1]}]'])
def test_other_records_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="not a list of questions with their blocks"):
        read_labelled([str(write(tmp_path / "dpr.json", content))])


def test_records_without_any_right_block_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "dpr.json", json.dumps([record("q", positive_ctxs=[])]))
    with pytest.raises(DataError, match="no question has a block that answers it"):
        read_labelled([str(path)])
