"""Files appear whole or not at all."""

import errno
import os

import pytest

from megatron import atomic
from megatron.errors import MachineError


def test_publishing_replaces_the_old_file_and_removes_the_temporary_name(tmp_path):
    final = tmp_path / "x.bin"
    final.write_text("old")
    temporary = atomic.temporary_name(final)
    temporary.write_text("new")
    atomic.publish_file(temporary, final)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
    assert final.read_text() == "new"


def test_temporary_names_are_beside_the_file_and_never_repeat(tmp_path):
    names = {atomic.temporary_name(tmp_path / "x") for _ in range(20)}
    assert len(names) == 20
    assert {name.parent for name in names} == {tmp_path}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_an_error_only_if_the_disk_fails(
    tmp_path, monkeypatch, number
):
    temporary = tmp_path / "t"
    temporary.write_text("")

    def fail(_descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EINVAL:
        atomic.publish_file(temporary, tmp_path / "x")
        assert (tmp_path / "x").exists()
    else:
        with pytest.raises(OSError, match="Input/output"):
            atomic.publish_file(temporary, tmp_path / "x")


def test_the_error_for_a_refused_write_names_file_reason_and_remedy(tmp_path):
    error = atomic.write_error(tmp_path / "x.bin", OSError(errno.ENOSPC, "No space left"))
    assert isinstance(error, MachineError)
    assert "x.bin" in str(error)
    assert "No space left (errno 28)" in str(error)
    assert f"permissions of {tmp_path}" in str(error)
