"""Errors of reading name the path."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from tasks.text_files import read_records, read_text


def test_a_text_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\u00e9\n", encoding="utf-8")
    assert read_text(file) == "one\n\u00e9\n"


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").touch()
    with pytest.raises(DataError, match="does not exist") as raised:
        read_text(tmp_path / "vald.txt")
    assert "valid.txt" in str(raised.value)
    with pytest.raises(DataError, match="does not exist"):
        read_text(tmp_path / "no" / "such")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(file)


def test_records_are_lines_of_json_and_keep_every_character(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one\u2028two"}\n\n{"label": 3}\n', encoding="utf-8")
    first, second = read_records([str(file)])
    assert first.text("text") == "one\u2028two"
    assert (second.value("label"), second.where) == (3, f"{file}:3")
    with pytest.raises(DataError, match="a field is not a text"):
        second.text("label")
    with pytest.raises(DataError, match="lacks a field") as raised:
        second.value("lable")
    assert raised.value.fix == "call it 'lable', or read 'label' by its flag"


@pytest.mark.parametrize("line", ["[1]", "{", "5", '"text"'])
def test_another_line_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f"{{}}\n{line}\n")
    with pytest.raises(DataError, match="a line is not a JSON object") as raised:
        read_records([str(file)])
    assert f"{file}:2" in str(raised.value.found)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(" \n")
    with pytest.raises(DataError, match="there is nothing to evaluate"):
        read_records([str(tmp_path / "a.jsonl")])
