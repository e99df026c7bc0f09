"""Passages with questions, in files and folders, and what is wrong with others."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from tasks.finetune.examples import TextPair
from tasks.finetune.race import read_race

PASSAGE: dict[str, Any] = {
    "article": "A cat sat.",
    "questions": ["Who sat?", "The _ sat."],
    "options": [["a cat", "a dog", "a hen", "a cow"], ["dog", "cat", "hen", "cow"]],
    "answers": ["A", "B"],
}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_a_folder_of_passages_is_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "high" / "2.txt", PASSAGE)
    write(tmp_path / "high" / "1.txt", PASSAGE | {"article": "First."})
    examples = read_race([str(tmp_path)])
    assert [example.label for example in examples] == [0, 1, 0, 1]
    assert examples[0].rows[1] == TextPair("Who sat? a dog", "First.")
    assert examples[1].rows[1] == TextPair("The cat sat.", "First.")
    assert len({example.uid for example in examples}) == 4


def test_lines_and_passages_without_answers_are_read_too(tmp_path: Path) -> None:
    unknown = {key: value for key, value in PASSAGE.items() if key != "answers"}
    file = tmp_path / "test.jsonl"
    file.write_text("\n".join(map(json.dumps, [PASSAGE, unknown])) + "\n")
    assert [example.label for example in read_race([str(file)])] == [0, 1, None, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": ["E", "B"]}, "wanted A, B, C or D"),
        ({"options": [["a", "b", "c"], ["d", "e", "f", "g"]]}, "has not 4 answers"),
        ({"options": [["a", "b", "c", "d"]]}, "one entry for each of 2 questions"),
        ({"answers": ["A"]}, "one entry for each of 2 questions"),
        ({"answers": "AB"}, "one entry for each of 2 questions"),
        ({"questions": ["Who sat?", 3]}, "a field is not a list of texts"),
        ({"questions": "Who sat?"}, "a field is not a list of texts"),
        ({"article": 7}, "a field is not a text"),
        ({"article": " "}, "an example has an empty text"),
        ({"questions": [" ", "_"], "options": [[""] * 4, [""] * 4]}, "an example has an empty"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        read_race([str(write(tmp_path / "a.txt", PASSAGE | changes))])


def test_files_that_are_not_of_race_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a passage of RACE lacks a part"):
        read_race([str(write(tmp_path / "a.txt", {"article": "x"}))])
    broken = tmp_path / "b.txt"
    broken.write_text("{")
    with pytest.raises(DataError, match="a line is not a JSON object"):
        read_race([str(broken)])
    broken.write_text("[1]")
    with pytest.raises(DataError, match="a line is not a JSON object"):
        read_race([str(broken)])
    unknown = {key: value for key, value in PASSAGE.items() if key != "answers"}
    with pytest.raises(DataError, match="a passage of RACE lacks a part") as raised:
        read_race([str(write(tmp_path / "d.txt", unknown))], needs_labels=True)
    assert "wanted answers" in str(raised.value.found)
    nothing: dict[str, Any] = {"questions": [], "options": [], "answers": []}
    with pytest.raises(DataError, match="there is no question"):
        read_race([str(write(tmp_path / "c.txt", PASSAGE | nothing))])
