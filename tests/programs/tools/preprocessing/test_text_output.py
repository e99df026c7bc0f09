"""Files that a tool writes appear whole, or not at all."""

import errno
from pathlib import Path

import pytest

from megatron.errors import MachineError
from tools.preprocessing.text_output import AtomicTextFile


def break_off(path: Path) -> None:
    with AtomicTextFile(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_file_that_cannot_be_written_whole_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        break_off(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MachineError, match="cannot write"), AtomicTextFile(tmp_path / "a") as file:
        file.write(b"all")
    assert list(tmp_path.iterdir()) == []
