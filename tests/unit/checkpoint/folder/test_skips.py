"""Iterations to pass over stand in a file that is whole, or the run does not start."""

from pathlib import Path

import pytest

from megatron.checkpoint.folder.run_folder import never_held_a_checkpoint
from megatron.checkpoint.folder.skips import NAME, record_skip, recorded_skips
from megatron.errors import CheckpointError, MachineError


def test_ranges_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "save"
    assert recorded_skips(folder) == ()
    assert record_skip(folder, 6, 7) == folder / NAME
    record_skip(folder, 12, 12)
    assert recorded_skips(folder) == ("6-7", "12-12")
    assert [path.name for path in folder.iterdir()] == [NAME], "a temporary file stays"


def test_a_folder_with_ranges_alone_never_held_a_checkpoint(tmp_path: Path) -> None:
    record_skip(tmp_path, 1, 2)
    assert never_held_a_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"ranges": 7}', "TypeError"),
        ('{"ranges": ["9-8"]}', "9-8"),
        ("[]", "TypeError"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError, match="the file of iterations to pass over") as caught:
        recorded_skips(tmp_path)
    assert found in str(caught.value.found)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "save").write_text("no folder")
    with pytest.raises((MachineError, CheckpointError), match="skipped_iterations"):
        record_skip(tmp_path / "save", 1, 2)
