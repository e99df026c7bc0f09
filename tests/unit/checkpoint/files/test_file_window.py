"""A window of a file behaves as the file that its bytes would be."""

import io
import os
from pathlib import Path

import pytest

from megatron.checkpoint.files.file_window import FileWindow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(range(20)))
    return tmp_path / "file"


def test_reads_and_moves_stay_in_the_window(path: Path) -> None:
    with FileWindow(path, 5, 10) as window:
        expected = io.BytesIO(bytes(range(5, 15)))
        for offset, whence, count in (
            (0, os.SEEK_SET, 3),
            (2, os.SEEK_CUR, 4),
            (-4, os.SEEK_END, 9),
            (3, os.SEEK_END, 1),
        ):
            assert window.seek(offset, whence) == expected.seek(offset, whence)
            assert window.read(count) == expected.read(count)
            assert window.tell() == expected.tell()
        assert window.readable()
        assert window.seekable()
        assert str(window) == f"{path} at bytes 5 to 15"
    assert window.closed


def test_a_file_that_was_cut_ends_the_window_early(path: Path) -> None:
    with FileWindow(path, 15, 10) as window:
        assert window.read() == bytes(range(15, 20))


def test_a_position_before_the_window_is_refused(path: Path) -> None:
    with (
        FileWindow(path, 5, 10) as window,
        pytest.raises(ValueError, match=r"before the start of .* at bytes 5 to 15"),
    ):
        window.seek(-1)
