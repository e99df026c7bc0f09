"""Sample indices kept on disk: built once, published whole, verified on every load.

The name of an entry is a fingerprint of the corpus and of every parameter of the order, so a stale
entry cannot be found. What a reader would get wrong: a damaged entry is no error, because it can be
built again from the corpus; this is logged. The caller decides which rank builds and how ranks wait
for each other. Builders of several nodes or jobs that see one folder build once, under a lock with
a lease; a rank that does not see the builder's file (node-local disks) builds its own, which has
the same bytes.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import atomic, log
from megatron.data.corpus.checksums import IndexHasher
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.orders.lease import LeaseTiming, leased, report_while, wait_while_leased
from megatron.errors import ConfigError, MachineError

Arrays = Mapping[str, npt.NDArray[np.integer]]
Description = Mapping[str, str | int | float]

_FORMAT_VERSION = 1
_READ_BYTES = 8 * 2**20
_LARGE_BYTES = 64 * 2**20  # an index from this size on is logged
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def description_digest(description: Description) -> str:
    """Return 32 hex digits of the xxh3-128 of `description` as canonical JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(dict(description), sort_keys=True).encode())


def cache_folders(prefix: str, cache_path: str | None = None) -> tuple[Path, ...]:
    """Return the folders for indices of the corpus `prefix`, in the order in which they are tried.

    The value of --data-cache-path alone when there is one; else a folder beside the corpus, else
    one in the home directory for corpora on read-only file systems.
    """
    if cache_path is not None:
        return (Path(cache_path),)
    beside = Path(os.path.abspath(prefix)).parent / "index-cache"
    return (beside, Path.home() / ".cache" / "megatron-verified" / "index-cache")


class CachedIndex:
    """Read-only arrays mapped from the files of one cache entry; pickles as their paths."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._arrays: dict[str, npt.NDArray[np.integer]] = {
            # As plain arrays over the mapping: indexing an np.memmap creates another np.memmap.
            key: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            for key, path in files.items()
        }

    def __getitem__(self, key: str) -> npt.NDArray[np.integer]:
        return self._arrays[key]

    @property
    def files(self) -> dict[str, Path]:
        """The file behind each array."""
        return dict(self._files)

    def __reduce__(self) -> tuple[object, ...]:
        return (CachedIndex, (self._files,))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCache:
    """A place for indices and this rank's part in filling it.

    `wait` is a barrier over every rank that calls with the same arguments; each call of
    `load_or_build` reaches it exactly once, also when building fails. `report_progress` is called
    from a thread while this rank builds, for ranks of other nodes, which do not see its lock.
    """

    folders: tuple[Path, ...]
    is_builder: bool = True
    wait: Callable[[], None] = lambda: None
    report_progress: ReportProgress = no_progress
    timing: LeaseTiming = LeaseTiming()

    def load_or_build(
        self, name: str, description: Description, *, build: Callable[[], Arrays]
    ) -> CachedIndex:
        """Return the arrays of `build` for `description`, from the cache if it has them."""
        stem = f"{name}-{description_digest(description)}"
        if self.is_builder:
            try:
                return self._load(stem, description) or self._build(stem, description, build)
            finally:
                self._wait(stem)
        # Barriers time out after minutes, so ranks that see the builder's lock wait for it instead.
        wait_while_leased(
            [folder / f"{stem}.lock" for folder in self.folders],
            f"building the index {stem}",
            self.timing,
            is_done=lambda: any((folder / f"{stem}.json").exists() for folder in self.folders),
        )
        self._wait(stem)
        found = self._load(stem, description)
        if found is None:
            log.warning_once(
                "index_cache",
                f"the index {stem} of the building rank is not visible on this one under "
                f"{self.folders[0]}; it is built here too",
            )
            found = self._build(stem, description, build)
        return found

    def _wait(self, stem: str) -> None:
        with report_while(
            f"waiting for the ranks that build the index {stem}", self.timing.log_every_s
        ):
            try:
                self.wait()
            except MachineError as error:
                error.add_note(f"while waiting for the ranks that build the index {stem}")
                raise
            except RuntimeError as error:  # what torch raises when ranks do not meet in time
                raise MachineError(
                    f"the ranks did not meet after the index {stem} was built",
                    found=error,
                    fix="read the logs of the other ranks; if one still builds, allow more "
                    "--distributed-timeout-minutes",
                ) from error

    def _build(
        self, stem: str, description: Description, build: Callable[[], Arrays]
    ) -> CachedIndex:
        """Build and publish an entry, or load what another process has built meanwhile."""
        with self._lock(stem):
            found = self._load(stem, description)
            if found is None:
                started = time.monotonic()
                with report_while(
                    f"building the index {stem}", self.timing.log_every_s, self.report_progress
                ):
                    found = self._publish(stem, description, build())
                size = sum(path.stat().st_size for path in found.files.values())
                elapsed = time.monotonic() - started
                if size >= _LARGE_BYTES or elapsed >= self.timing.log_every_s:
                    log.info(f"built the index {stem}: {size / 2**20:.0f} MiB in {elapsed:.0f} s")
        return found

    @contextmanager
    def _lock(self, stem: str) -> Iterator[None]:
        """Hold a lock in the first writable folder; no lock if there is none."""
        with ExitStack() as held:
            for folder in self.folders:
                path = folder / f"{stem}.lock"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    manifest = folder / f"{stem}.json"
                    is_new = partial(_is_another, manifest, _identity(manifest))
                    what = f"building the index {stem}"
                    held.enter_context(leased(path, what, self.timing, is_done=is_new))
                    break
                except OSError as error:
                    if error.errno not in _NOT_WRITABLE:
                        raise atomic.write_error(path, error) from error
            yield  # without a folder `_publish` raises the error

    def _load(self, stem: str, description: Description) -> CachedIndex | None:
        for folder in self.folders:
            manifest = folder / f"{stem}.json"
            if not manifest.exists():
                continue
            try:
                return CachedIndex(_verified_files(folder, stem, description))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
                log.warning(f"the index {manifest} is damaged ({error}); it is built again")
        return None

    def _publish(self, stem: str, description: Description, arrays: Arrays) -> CachedIndex:
        refused = []
        for folder in self.folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files = _write_entry(folder, stem, description, arrays)
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise atomic.write_error(folder / stem, error) from error
                refused.append(f"{folder}: {error.strerror}")
                continue
            if refused:
                log.warning_once(
                    f"index_cache {folder}",
                    f"sample indices cannot be kept in {refused[0]}; they go to {folder}",
                )
            return CachedIndex(files)
        raise ConfigError(
            "there is no folder to keep sample indices in",
            found="; ".join(refused),
            fix="give a writable folder with --data-cache-path",
        )


def _verified_files(folder: Path, stem: str, description: Description) -> dict[str, Path]:
    """Return the files of an entry; raises ValueError or the like where one differs."""
    manifest = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))
    if manifest["format_version"] != _FORMAT_VERSION:
        raise ValueError(f"format_version {manifest['format_version']}")
    if manifest["description"] != dict(description):
        raise ValueError("it describes another index")
    files = {}
    for key, record in manifest["arrays"].items():
        files[key] = _array_file(folder, stem, key)
        size = files[key].stat().st_size
        if size != record["bytes"]:
            raise ValueError(f"{files[key].name} has {size} bytes, not {record['bytes']}")
        if _checksum(files[key]) != record["xxh3_128"]:
            raise ValueError(f"{files[key].name} has another checksum")
    return files


def _write_entry(
    folder: Path, stem: str, description: Description, arrays: Arrays
) -> dict[str, Path]:
    """Write all, then publish the arrays, then the manifest: an entry without one does not exist.

    If the disk is full nothing is left, and an existing entry stays.
    """
    files = {key: _array_file(folder, stem, key) for key in arrays}
    manifest = folder / f"{stem}.json"
    written = {path: atomic.temporary_name(path) for path in (*files.values(), manifest)}
    try:
        records = {key: _write_array(written[files[key]], array) for key, array in arrays.items()}
        content = {
            "format_version": _FORMAT_VERSION,
            "description": dict(description),
            "arrays": records,
        }
        with open(written[manifest], "w", encoding="utf-8") as text:
            json.dump(content, text, indent=1, sort_keys=True)
            text.flush()
            os.fsync(text.fileno())
        for path, temporary in written.items():
            atomic.publish_file(temporary, path)
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
    return files


def _write_array(path: Path, array: npt.NDArray[np.integer]) -> dict[str, int | str]:
    """Write one array and force it to disk; return its record in the manifest."""
    with open(path, "wb") as file:
        # When a disk fills up, the error of NumPy's own writer lacks the errno.
        hasher = IndexHasher(file)
        np.save(hasher, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hasher.total_bytes, "xxh3_128": hasher.digest().hex()}


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_another(path: Path, before: tuple[int, int] | None) -> bool:
    """Return whether `path` has appeared or was replaced since it was `before`."""
    return _identity(path) not in (None, before)


def _array_file(folder: Path, stem: str, key: str) -> Path:
    if not key.isidentifier():
        raise ValueError(f"{key!r} is no name of an array")
    return folder / f"{stem}-{key}.npy"


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
