"""What cannot be read is said with its path."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from tasks.text_files import read_text


def test_a_text_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\u00e9\n", encoding="utf-8")
    assert read_text(file) == "one\n\u00e9\n"


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").touch()
    with pytest.raises(DataError, match="does not exist") as said:
        read_text(tmp_path / "vald.txt")
    assert "valid.txt" in str(said.value)
    with pytest.raises(DataError, match="does not exist"):
        read_text(tmp_path / "no" / "such")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="cannot be read"):
        read_text(file)
