"""Where the files of checkpoints live: folders of this machine, or objects behind an address.

`place("s3://bucket/run")` has the few methods of a `Path` that reading needs, through fsspec;
`create` makes a file on either, durable and compared with what was written. What a reader would get
wrong: objects cannot be renamed, so a checkpoint exists once its manifest, written last, does.
"""

import errno
import hashlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from megatron import log
from megatron.checkpoint.files.durable import DurableFile, refuse_if_cancelled
from megatron.errors import ConfigError

T = TypeVar("T")

PART_BYTES = 64 << 20  # of an upload; S3 takes 10,000 parts, so a file of up to 640 GB
_READ_BYTES = 8 << 20  # of an object; each read is a request
_CACHED_BYTES = 1 << 20  # of a file; so much is still in the cache of the core when it is digested
_TRIES = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # doubled after each try
_TIMEOUT_S = 20.0  # for a server to answer
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PLUGINS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # what a user has to install for a scheme
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET),
        *(errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETUNREACH),
        *(errno.EHOSTUNREACH, errno.EREMOTEIO),
    }
)
# Of libraries that need not be installed: botocore, aiohttp, fsspec.
_TRANSIENT_NAMES = frozenset(
    {
        *("EndpointConnectionError", "HTTPClientError", "ConnectionClosedError"),
        *("ReadTimeoutError", "ConnectTimeoutError", "ResponseStreamingError"),
        *("ClientConnectionError", "ClientPayloadError", "FSTimeoutError", "IncompleteRead"),
    }
)
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}
)
# Keys of AWS, signatures in addresses, and passwords in front of a host.
_SECRETS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|(?<=://)[^/@\s]+@|"
    r"(?i:(?:signature|credential|security-token|secret\w*|password|token)\s*[=:]\s*)[^\s&,;]+"
)


def place(text: "str | Path | RemotePath") -> "Place":
    """Return the folder or the address that `text` names, without accessing it.

    Raises:
        ConfigError: the address is of a kind that nothing installed here can reach, or it holds a
            password.
    """
    if not isinstance(text, str):
        return text
    match = _ADDRESS.fullmatch(text)
    if match is None:
        return Path(text)
    scheme, key = match[1].lower(), match[2]
    if scheme == "file":
        return Path(key)
    if "@" in key.split("/")[0] or "?" in key:
        raise ConfigError(
            "an address of checkpoints holds a password or options, which would be in every log",
            found=f"{scheme}://...@{key.rpartition('@')[2].partition('?')[0]}",
            fix="give the bare address, and credentials where its library looks for them "
            "(for s3: the environment or ~/.aws)",
        )
    key = key.strip("/")
    if not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ConfigError(
            "an address of checkpoints names no folder", found=text, fix="use s3://BUCKET/FOLDER"
        )
    return RemotePath(scheme, key, _file_system(scheme))


def _file_system(scheme: str) -> Any:
    try:
        fsspec = importlib.import_module("fsspec")
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme == "s3":
            # Parts of a known size have a known checksum.
            options |= {"fixed_upload_size": True, "default_block_size": PART_BYTES}
            options["config_kwargs"] = {
                "connect_timeout": _TIMEOUT_S,
                "read_timeout": _TIMEOUT_S,
                "retries": {"max_attempts": 2},  # retries are made here, so that they stay few
            }
        made = fsspec.filesystem(scheme, **options)
        if scheme == "s3":
            made.retries = 1
        return made
    except (ImportError, ValueError) as error:
        names = ["fsspec", *([_PLUGINS[scheme]] if scheme in _PLUGINS else [])]
        raise ConfigError(
            "nothing installed here reaches an address of this kind",
            found=f"{scheme}://: {_error_text(error)}",
            fix=f"pip install {' '.join(names)}, or use a folder",
        ) from error


class RemoteStat(NamedTuple):
    """The fields of `Path.stat()` that are used."""

    st_size: int


@dataclass(frozen=True, slots=True)
class RemotePath:
    """An object, or a folder of objects, by its address; the methods are those of `Path`.

    Every method retries after failures of the server or the network, with growing pauses, and
    raises OSError with the address in it. `token` marks the objects of one save.
    """

    scheme: str
    key: str  # the bucket and what is below, without a slash at either end
    fs: Any = field(repr=False, compare=False)
    token: str | None = None
    kind: str | None = field(default=None, repr=False, compare=False)  # where a listing gave it

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (place, (str(self),))  # connections do not travel between processes

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.scheme, f"{self.key}/{name}", self.fs, self.token)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The address without its last part."""
        return RemotePath(self.scheme, self.key.rpartition("/")[0], self.fs)

    def stat(self) -> RemoteStat:
        """Return the length of an object; FileNotFoundError when there is none."""
        return RemoteStat(int(self._info()["size"]))

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            return str(self.kind or self._info()["type"]) == "file"
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Return whether there are objects below this name."""
        try:
            return str(self.kind or self._info()["type"]) == "directory"
        except FileNotFoundError:
            return False

    def exists(self) -> bool:
        """Return whether there is an object of this name, or any below it."""
        return self.is_dir() or self.is_file()

    def is_symlink(self) -> bool:
        """Return False: objects are no links."""
        return False

    def iterdir(self) -> "Iterator[RemotePath]":
        """Yield the objects and folders directly below."""
        try:
            listed = self.attempt(lambda: self.fs.ls(self._at, detail=True))
        except FileNotFoundError:
            return
        found = {str(e["name"]).rstrip("/").rpartition("/")[2]: str(e["type"]) for e in listed}
        for name, kind in sorted(found.items()):
            if name and name != self.name:
                yield replace(self / name, kind=kind)

    def find(self) -> list[str]:
        """Return the names of all objects below, with slashes, in one listing."""
        try:
            keys = self.attempt(lambda: self.fs.find(self._at))
        except FileNotFoundError:
            return []
        return [str(key).lstrip("/").removeprefix(f"{self.key}/") for key in sorted(keys)]

    def open(self, mode: str = "rb", buffering: int = 0) -> "RemoteReader":
        """Return the object, to be read; it has to be there."""
        assert mode == "rb"  # noqa: S101  # invariant: `create` writes
        return RemoteReader(self)

    def read_bytes(self) -> bytes:
        """Return all of the object."""
        return bytes(self.attempt(lambda: self.fs.cat_file(self._at)))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            self.attempt(lambda: self.fs.rm_file(self._at))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def attempt(self, call: Callable[[], T], *, tries: int = _TRIES) -> T:
        """Return the value of `call`, retried a few times after transient faults.

        Raises:
            OSError: as a disk would raise it, with this address.
        """
        pause = _FIRST_PAUSE_S
        for left in reversed(range(tries)):
            try:
                return call()
            except Exception as error:
                if not isinstance(error, OSError) and _is_ours(error):
                    raise
                if not left or not _is_transient(error):
                    raise _as_os_error(error, str(self), tries - left) from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise AssertionError  # invariant: the last try returns or raises

    @property
    def _at(self) -> str:
        return f"/{self.key}" if self.scheme == "memory" else self.key

    def _info(self) -> Any:
        def ask() -> Any:
            self.fs.invalidate_cache()
            return self.fs.info(self._at)

        return self.attempt(ask)


Place = Path | RemotePath


class RemoteReader:
    """An object, read like an unbuffered file: by ranges, each with its own retries."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size, self._at = path, path.stat().st_size, 0

    def __enter__(self) -> "RemoteReader":
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def seek(self, at: int) -> int:
        """Go on from byte `at`."""
        self._at = at
        return at

    def read_at(self, start: int, count: int) -> bytes:
        """Return the `count` bytes from `start` on, fewer at the end; several threads may ask."""
        stop, path = min(self._size, start + count), self._path
        if stop <= start:
            return b""
        return bytes(path.attempt(lambda: path.fs.cat_file(path._at, start=start, end=stop)))

    def read(self, count: int = -1) -> bytes:
        """Return the next `count` bytes (all that are left when negative), fewer at the end."""
        data = self.read_at(self._at, self._size if count < 0 else count)
        self._at += len(data)
        return data

    def readinto(self, target: "bytearray | memoryview") -> int:
        """Fill `target` as far as there are bytes; returns how many."""
        view = memoryview(target)
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing: no resource is held."""


class Created(NamedTuple):
    """Size and digest of a file that was made durable."""

    bytes: int
    xxh3: str


def create(path: Place, fill: Callable[["NewFile"], T], *, again: bool = True) -> tuple[Created, T]:
    """Write the file `path` durably by `fill(file)`; return its record and the value of `fill`.

    On a disk that is `DurableFile`. An object is uploaded, and then compared by its length and its
    checksum, or read back where the store gives no checksum that can be computed here. If an upload
    has to be repeated, `fill` is called again, unless `again` is false.

    Raises:
        OSError: it could not be written, or differs from what was written.
    """
    if isinstance(path, Path):
        with DurableFile(path) as file:
            value = fill(file)
        return Created(file.bytes, file.xxh3), value

    def upload() -> tuple[Created, T]:
        new = _Upload(path)
        try:
            result = fill(new)
            new.finish()
        except BaseException:
            new.abandon()
            raise
        return Created(new.bytes, new.xxh3), result

    return path.attempt(upload, tries=_TRIES if again else 1)


def write_object(path: Place, data: bytes) -> None:
    """Write a file with `data` in it; an existing object is replaced atomically."""
    create(path, lambda file: file.write(data))


def read_at(file: "FileIO | RemoteReader", target: memoryview, start: int) -> int:
    """Fill `target` from byte `start` of an unbuffered file on; returns how many bytes came.

    The file's position is neither used nor changed, so several threads may read one file.
    """
    if isinstance(file, RemoteReader):
        data = file.read_at(start, len(target))
        target[: len(data)] = data
        return len(data)
    return os.preadv(file.fileno(), [target], start)


def digest_of(path: Place, *, from_disk: bool = False) -> tuple[int, str]:
    """Return bytes and xxh3-128 digest of a file, read in chunks.

    Args:
        from_disk: drop the file from the system's page cache first.
    """
    total, digest = 0, xxhash.xxh3_128()
    buffer = bytearray(_CACHED_BYTES if isinstance(path, Path) else _READ_BYTES)
    with path.open("rb", buffering=0) as file:
        if not isinstance(file, RemoteReader) and hasattr(os, "posix_fadvise"):  # not on macOS
            if from_disk:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # The system reads further ahead, so that the disk works on while a block is digested.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            total += count
    return total, str(digest.hexdigest())


def name_of_part(directory: Place, name: str) -> str:
    """Return the name of a checkpoint's file in `directory`.

    Objects are never overwritten: those of another save of the same iteration stay readable until
    the new manifest is there.
    """
    if isinstance(directory, Path) or directory.token is None:
        return name
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{directory.token}{dot}{suffix}"


class _Upload:
    """An object that is written once from start to end, and exists only after `finish`.

    One part or less goes in one request, which every store takes whole or not at all.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._hash, self._part, self._part_bytes = xxhash.xxh3_128(), _md5(), 0
        self._parts: list[bytes] = []
        self._file: Any = None  # once there is more than a part
        self._held = bytearray()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        refuse_if_cancelled()
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.bytes += len(view)
        while view:
            piece = view[: PART_BYTES - self._part_bytes]
            if self._file is None and len(self._held) == PART_BYTES:
                self._file = self._path.fs.open(self._path._at, "wb", block_size=PART_BYTES)
                self._file.write(self._held)
                self._held.clear()
            if self._file is None:
                self._held += piece
            else:
                self._file.write(piece)
            self._part.update(piece)
            self._part_bytes += len(piece)
            if self._part_bytes == PART_BYTES:
                self._parts.append(self._part.digest())
                self._part, self._part_bytes = _md5(), 0
            view = view[len(piece) :]

    @property
    def xxh3(self) -> str:
        """The xxh3-128 digest of everything written so far, in hexadecimal."""
        return str(self._hash.hexdigest())

    def finish(self) -> None:
        """Complete the upload, and compare it; OSError if it differs from what was written."""
        if self._file is None:
            self._path.fs.pipe_file(self._path._at, bytes(self._held))
        else:
            self._file.close()
        info = self._path._info()
        if int(info["size"]) != self.bytes:
            raise OSError(errno.EIO, f"{info['size']} bytes arrived of {self.bytes}")
        if str(info.get("ETag", "")).strip('"') in self._checksums():
            return
        _, found = digest_of(self._path)
        if found != self.xxh3:
            raise OSError(errno.EIO, f"xxh3 {found} arrived, {self.xxh3} was sent")

    def abandon(self) -> None:
        """Abort the upload; errors of the abort are logged."""
        if self._file is None or self._file.closed or not hasattr(self._file, "buffer"):
            return
        self._file.closed = True  # or it would be completed when memory is collected
        try:
            self._file.discard()
        except Exception as error:  # the upload's own error is the one to report
            log.debug(f"{self._path}: an upload that failed is left behind: {_error_text(error)}")

    def _checksums(self) -> set[str]:
        """Return the ETags that S3 gives an intact object: uploaded in one piece, or in parts."""
        parts = [*self._parts, *([self._part.digest()] if self._part_bytes else [])]
        parts = parts or [self._part.digest()]  # of an empty file
        whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
        single = {parts[0].hex()} if len(parts) == 1 else set()
        return {f"{whole}-{len(parts)}", *single}


NewFile = DurableFile | _Upload


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT:
        return True
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def _is_ours(error: Exception) -> bool:
    """Return whether the error is one of this program, not of a library for objects."""
    return type(error).__module__.partition(".")[0] in ("builtins", "megatron")


def _as_os_error(error: Exception, address: str, tries: int) -> OSError:
    """Return the text of an error of a store's library, without secrets."""
    text = _error_text(error) + (f" (tried {tries} times)" if tries > 1 else "")
    if type(error).__name__ in _NO_CREDENTIALS or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, text, address)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, text, address)
    code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return OSError(code, text, address)


def _error_text(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return without_secrets(" ".join(str(text).split()))


def without_secrets(text: str) -> str:
    """Return `text` with possible credentials replaced by ***."""
    return _SECRETS.sub("***", text)
