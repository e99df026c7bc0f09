"""Durable files: whole or an error; the order of write, fsync and rename."""

import errno
import os

import pytest
import xxhash

from megatron.checkpoint.files import durable, store


def test_a_file_is_digested_as_it_is_written(tmp_path):
    with durable.DurableFile(tmp_path / "a") as file:
        file.write(b"one")
        file.write(memoryview(b"two"))
    expected = xxhash.xxh3_128_hexdigest(b"onetwo")
    assert (file.bytes, file.xxh3) == (6, expected)
    assert store.digest_of(tmp_path / "a") == (6, expected)


def test_the_disk_begins_before_all_is_written_and_each_byte_once(tmp_path, monkeypatch):
    advised = []
    monkeypatch.setattr(durable, "_AHEAD_BYTES", 10)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, size, how: advised.append((start, size))
    )
    with durable.DurableFile(tmp_path / "x") as file:
        for size in (4, 6, 9, 25, 3):
            file.write(b"a" * size)
    assert advised == [(0, 10), (10, 34)]
    assert (tmp_path / "x").read_bytes() == b"a" * 47


def test_an_existing_file_is_never_written_over(tmp_path):
    durable.write_file(tmp_path / "a", b"old")
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_failed_fsync_is_a_failed_write_that_names_the_file(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"Input/output error.*a"):
        durable.write_file(tmp_path / "a", b"data")


def test_a_file_is_synced_before_it_is_renamed_and_the_folder_after(tmp_path, monkeypatch):
    calls = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b)))
    durable.replace_file(tmp_path / "a", b"1", suffix="00")
    assert calls == ["fsync", "rename", "fsync"]
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_replacement_leaves_the_former_content_and_nothing_beside(tmp_path, monkeypatch):
    durable.replace_file(tmp_path / "a", b"old", suffix="00")

    def fail(source, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Read-only"):
        durable.replace_file(tmp_path / "a", b"new", suffix="01")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "free space"), (errno.EROFS, "writable"), (0, "see what")]
)
def test_what_the_system_refused_comes_with_a_fix(number, fix):
    error = durable.from_os_error(OSError(number, "why", "/save/x"), "writing")
    assert "writing failed: why" in str(error)
    assert "/save/x" in str(error)
    assert fix in error.fix
