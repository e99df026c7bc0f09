"""A result that could not be written is known before the work, and a written one is whole."""

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tasks.results import check_output, write_result


def test_a_place_without_a_folder_is_refused(tmp_path: Path) -> None:
    check_output(None)
    check_output(str(tmp_path / "a.json"))
    with pytest.raises(ConfigError, match="results cannot be written there") as raised:
        check_output(str(tmp_path / "none" / "a.json"))
    assert f"there is no folder {tmp_path / 'none'}" in str(raised.value.found)
    with pytest.raises(ConfigError, match="it is a folder"):
        check_output(str(tmp_path))


def test_numbers_without_end_are_texts(tmp_path: Path) -> None:
    write_result(str(tmp_path / "a.json"), {"x": [1.5, float("nan")], "y": {"z": float("inf")}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1.5, "nan"], "y": {"z": "inf"}}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    write_result(None, {})
