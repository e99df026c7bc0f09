"""Files of Megatron-LM name the corpora that flags name here."""

import json
from pathlib import Path

import pytest

from megatron.arguments import parse_given
from tests.unit.config.groups import COMMAND, problems_of

WITHOUT_DATA = [word for word in COMMAND if word not in ("--data-path", "corpus")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "paths"


def test_a_file_of_words_is_the_data_path(file: Path) -> None:
    file.write_text("30 a_text_document\n  70 b_text_document\n")
    expected = ("30", "a_text_document", "70", "b_text_document")
    assert parse_given(["--data-args-path", str(file)]) == {"data_path": expected}


def test_a_json_file_names_the_corpora_of_each_split(file: Path) -> None:
    file.write_text(json.dumps({"train": ["30", "a", 0.5, "b"], "valid": ["c"], "test": None}))
    assert parse_given(["--per-split-data-args-path", str(file)]) == {
        "train_data_path": ("30", "a", "0.5", "b"),
        "valid_data_path": ("c",),
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Expecting property name"),
        ('{"train": ["a"], "train": ["b"]}', "train: named twice"),
        ('{"training": ["a"]}', "not an object with the keys train, valid and test alone"),
        ("[]", "not an object with the keys"),
        ('{"train": "a"}', "train is not a list of weights and prefixes"),
        ('{"train": [["a"]]}', "train is not a list of weights and prefixes"),
    ],
)
def test_a_json_file_of_something_else_is_refused(file: Path, content: str, why: str) -> None:
    file.write_text(content)
    words = ["--per-split-data-args-path", str(file)]
    error, *_ = problems_of(*words, base=WITHOUT_DATA)
    assert error.problem == "a file of data paths cannot be read"
    assert error.found is not None
    assert error.found.startswith(f"--per-split-data-args-path {file}: ")
    assert why in error.found


@pytest.mark.parametrize("flag", ["--data-args-path", "--per-split-data-args-path"])
def test_a_file_that_is_missing_is_named(file: Path, flag: str) -> None:
    error, *_ = problems_of(flag, str(file), base=WITHOUT_DATA)
    assert error.found == f"{flag} {file}: No such file or directory"
    file.write_bytes(b"\xff")
    error, *_ = problems_of(flag, str(file), base=WITHOUT_DATA)
    assert error.found is not None
    assert "can't decode byte" in error.found


def test_one_file_is_named() -> None:
    (error,) = problems_of("--data-args-path", "a", "b")
    assert error.problem == "a flag of another Megatron has a value without counterpart here"
