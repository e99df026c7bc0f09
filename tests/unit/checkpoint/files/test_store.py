"""Places of files: folders, objects in memory, a real S3 server; faults that pass and do not."""

import errno
import hashlib
import os
import pickle
import time
from pathlib import Path

import fsspec
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.files import store
from megatron.checkpoint.files.durable import CANCELLED, from_os_error
from megatron.checkpoint.files.store import RemotePath, place
from megatron.errors import ConfigError
from tests.support.checkpoints.object_store import BUCKET, SECRET, object_store

pytestmark = pytest.mark.slow


class Flaky(MemoryFileSystem):
    """Objects in memory whose operations fail on request."""

    protocol = "flaky"
    store: dict = {}  # noqa: RUF012  # as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    faults: dict = {}  # noqa: RUF012  # operation: errors that it raises first, one at each call
    calls: list = []  # noqa: RUF012

    def _fail(self, name):
        self.calls.append(name)
        left = self.faults.get(name, [])
        if left:
            raise left.pop(0)

    def info(self, path, **kwargs):
        self._fail("info")
        return super().info(path, **kwargs)

    def cat_file(self, path, **kwargs):
        self._fail("cat_file")
        return super().cat_file(path, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._fail("pipe_file")
        return super().pipe_file(path, value, **kwargs)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that were slept for, without sleeping."""
    slept = []
    monkeypatch.setattr(store.time, "sleep", slept.append)
    return slept


@pytest.fixture
def flaky(pauses):
    Flaky.store.clear()
    Flaky.faults.clear()
    Flaky.calls.clear()
    path = place("flaky://box/run")
    return RemotePath("memory", path.key, path.fs)  # whose keys begin with a slash


@pytest.fixture(params=["memory", "s3"])
def remote(request):
    """A folder of objects that holds nothing yet."""
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        yield place("memory://box/run")
        return
    with object_store() as server:
        yield place(f"{server.address}/run")


def busy(text="please slow down"):
    return OSError(errno.EBUSY, text)


@pytest.mark.parametrize("text", ["/a/b", "relative", "a:b", "file:///a/b", "~x"])
def test_what_is_no_address_is_a_path(text):
    assert place(text) == Path(text.removeprefix("file://"))
    assert place(Path(text)) == Path(text)


def test_an_address_is_written_as_it_was_given_and_travels_between_processes():
    there = place("memory://box/run/") / "iter_0000100"
    assert str(there) == "memory://box/run/iter_0000100"
    assert (there.name, str(there.parent)) == ("iter_0000100", "memory://box/run")
    assert pickle.loads(pickle.dumps(there)) == there
    assert place(there) is there


@pytest.mark.parametrize("text", ["s3://", "memory:///", "memory://a/../b", "memory://a//b"])
def test_an_address_has_to_name_a_folder(text):
    with pytest.raises(ConfigError, match="names no folder"):
        place(text)


def test_an_address_with_a_password_is_refused_without_saying_it():
    for text in ("s3://key:hunter2@bucket/run", "s3://bucket/run?secret=hunter2"):
        with pytest.raises(ConfigError, match="holds a password") as caught:
            place(text)
        assert "hunter2" not in str(caught.value)
        assert "bucket/run" in str(caught.value)


def test_an_address_of_an_unknown_kind_says_what_to_install():
    with pytest.raises(ConfigError, match="nothing installed here reaches") as caught:
        place("nowhere://bucket/run")
    assert "pip install fsspec" in caught.value.fix
    with pytest.raises(ConfigError, match="nothing installed") as caught:
        place("gs://bucket/run")
    assert "gcsfs" in caught.value.fix


def test_objects_are_read_like_files(remote):
    path = remote / "a" / "b.bin"
    assert not remote.exists()
    assert list(remote.iterdir()) == []
    created, value = store.create(path, lambda file: [file.write(b"0123"), file.write(b"456789")])
    digest = xxhash.xxh3_128_hexdigest(b"0123456789")
    assert (created, value) == ((10, digest), [None, None])
    assert (remote.is_dir(), remote.is_file(), remote.exists()) == (True, False, True)
    assert (path.is_dir(), path.is_file(), path.exists()) == (False, True, True)
    assert [str(entry) for entry in remote.iterdir()] == [f"{remote}/a"]
    assert path.stat().st_size == 10
    with path.open() as file:
        file.seek(3)
        assert (file.read(4), file.read()) == (b"3456", b"789")
        assert file.read() == b""
        buffer = bytearray(20)
        file.seek(0)
        assert file.readinto(buffer) == 10
    assert path.read_bytes() == b"0123456789"
    assert store.digest_of(path) == (10, digest)
    path.unlink()
    path.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"b\.bin"):
        path.open()
    with pytest.raises(FileNotFoundError, match=r"b\.bin"):
        path.read_bytes()


def test_an_object_is_replaced_at_once(remote):
    for data in (b"one", b"the other"):
        store.write_object(remote / "x", data)
        assert (remote / "x").read_bytes() == data


def test_a_file_on_a_disk_is_new_and_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    created, _ = store.create(tmp_path / "x", lambda file: file.write(b"abc"))
    assert created == store.Created(3, xxhash.xxh3_128_hexdigest(b"abc"))
    assert len(synced) == 1
    with pytest.raises(FileExistsError):
        store.write_object(tmp_path / "x", b"")


def test_parts_have_names_of_their_own_among_objects(tmp_path):
    there = place("memory://box/run")
    marked = RemotePath(there.scheme, there.key, there.fs, "0123abcd")
    assert store.name_of_part(tmp_path, "shard-0.safetensors") == "shard-0.safetensors"
    assert store.name_of_part(there, "shard-0.safetensors") == "shard-0.safetensors"
    assert store.name_of_part(marked, "shard-0.safetensors") == "shard-0.0123abcd.safetensors"


def test_what_may_pass_is_tried_again_with_growing_pauses(flaky, pauses):
    Flaky.faults["cat_file"] = [busy(), TimeoutError("slow"), ConnectionResetError("gone")]
    Flaky.store["/box/run/x"] = object
    store.write_object(flaky / "x", b"data")
    Flaky.faults["cat_file"] = [busy(), TimeoutError("slow"), ConnectionResetError("gone")]
    pauses.clear()
    assert (flaky / "x").read_bytes() == b"data"
    assert pauses == [0.2, 0.4, 0.8]


def test_what_does_not_pass_is_an_error_that_says_how_often_it_was_tried(flaky, pauses):
    Flaky.faults["info"] = [busy()] * 9
    with pytest.raises(OSError, match=r"please slow down \(tried 5 times\)") as caught:
        (flaky / "x").stat()
    assert caught.value.errno == errno.EBUSY
    assert caught.value.filename == "memory://box/run/x"
    assert len(pauses) == 4
    assert sum(pauses) < 5


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("Forbidden"), PermissionError),
        (FileNotFoundError("no bucket"), FileNotFoundError),
        (OSError(errno.EINVAL, "bad range"), OSError),
    ],
)
def test_what_cannot_pass_is_not_tried_again(flaky, pauses, error, kind):
    Flaky.faults["cat_file"] = [error]
    with pytest.raises(kind) as caught:
        (flaky / "x").read_bytes()
    assert str(error).split("] ")[-1] in str(caught.value)
    assert pauses == []


def test_an_upload_that_breaks_begins_anew(flaky, pauses):
    Flaky.faults["pipe_file"] = [OSError(errno.EIO, "Input/output error")]
    attempts = []

    def fill(file):
        attempts.append(file)
        file.write(b"whole")

    assert store.create(flaky / "x", fill)[0].bytes == 5
    assert (len(attempts), pauses) == (2, [0.2])
    attempts.clear()

    def break_once(file):
        attempts.append(file)
        file.write(b"whole")
        if len(attempts) == 1:
            raise ConnectionResetError("peer")

    store.create(flaky / "y", break_once)
    assert len(attempts) == 2
    assert (flaky / "y").read_bytes() == b"whole"


def test_what_can_be_made_only_once_is_uploaded_once(flaky, pauses):
    Flaky.faults["pipe_file"] = [busy()]
    with pytest.raises(OSError, match="slow down"):
        store.create(flaky / "x", lambda file: file.write(b"x"), again=False)
    assert pauses == []


def test_an_object_that_arrives_otherwise_is_found(flaky, monkeypatch):
    path = flaky / "x"

    class Flipped(store._Upload):
        def write(self, data):
            super().write(data)
            self._hash.update(b"more was meant")

    monkeypatch.setattr(store, "_Upload", Flipped)
    with pytest.raises(OSError, match=r"xxh3 [0-9a-f]+ arrived, [0-9a-f]+ was sent"):
        store.write_object(path, b"data")

    class Shorter(store._Upload):
        def write(self, data):
            super().write(data)
            self.bytes += 1

    monkeypatch.setattr(store, "_Upload", Shorter)
    with pytest.raises(OSError, match="4 bytes arrived of 5"):
        store.write_object(path, b"data")


@pytest.mark.parametrize("size", [0, 1, 5 << 20, (5 << 20) + 1, 11 << 20])
def test_the_checksum_of_s3_is_known_beforehand_in_one_piece_and_in_parts(monkeypatch, size):
    monkeypatch.setattr(store, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(store, "digest_of", lambda path: pytest.fail("was read back"))
    data = bytes(hashlib.sha256(b"x").digest()) * (size // 32) + b"y" * (size % 32)
    with object_store() as server:
        path = place(f"{server.address}/run") / "x"
        store.create(path, lambda file: [file.write(data[:1000]), file.write(data[1000:])])
        assert server.get("run/x") == data


def test_an_upload_that_is_given_up_leaves_no_object(monkeypatch):
    monkeypatch.setattr(store, "PART_BYTES", 5 << 20)
    with object_store() as server:
        path = place(f"{server.address}/run") / "x"

        def fill(file):
            file.write(bytes(6 << 20))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.create(path, fill)
        assert server.names() == []
        assert "Uploads" not in server.client.list_multipart_uploads(Bucket=BUCKET)


def test_a_thread_that_is_told_to_end_writes_no_more(tmp_path, flaky):
    import threading

    event = threading.Event()
    token = CANCELLED.set(event)
    try:
        store.write_object(flaky / "x", b"1")
        event.set()
        for path in (tmp_path / "x", flaky / "y"):
            with pytest.raises(OSError, match="cancel") as caught:
                store.write_object(path, b"1")
            assert caught.value.errno == errno.ECANCELED
    finally:
        CANCELLED.reset(token)


@pytest.mark.slow
def test_a_server_that_is_not_there_is_an_error_within_seconds(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    _forget_servers()
    started = time.monotonic()
    with pytest.raises(OSError, match=r"Could not connect .* \(tried 5 times\)") as caught:
        place("s3://bucket/run").read_bytes()
    assert time.monotonic() - started < 40
    text = str(from_os_error(caught.value, "reading"))
    assert "s3://bucket/run" in text
    assert SECRET not in text
    _forget_servers()


def _forget_servers():
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_missing_credentials_are_said_as_such(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    _forget_servers()
    with pytest.raises(PermissionError, match="credentials") as caught:
        place("s3://bucket/run").read_bytes()
    assert "~/.aws" in from_os_error(caught.value, "reading").fix
    _forget_servers()


@pytest.mark.parametrize(
    "text",
    [
        f"key AKIAIOSFODNN7EXAMPLE refused secret={SECRET}",
        f"https://h/b?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20260101&X-Amz-Signature={SECRET}",
        f"ftp://user:{SECRET}@host/path",
        f"aws_secret_access_key: {SECRET}, retry",
    ],
)
def test_secrets_are_blotted_out_of_what_a_server_says(text):
    cleaned = store.without_secrets(text)
    assert SECRET not in cleaned
    assert "AKIA" not in cleaned
    assert "***" in cleaned


def test_what_a_library_says_with_a_secret_in_it_is_said_without(flaky):
    Flaky.faults["info"] = [OSError(errno.EINVAL, f"bad signature={SECRET} of key")]
    with pytest.raises(OSError, match=r"bad \*\*\* of key") as caught:
        (flaky / "x").stat()
    assert SECRET not in str(caught.value)
