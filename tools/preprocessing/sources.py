"""What a preprocessing run reads, as one thing: the same chunks each time, and cut into parts.

Parts are consecutive, and all of their chunks together are rows in the order of the whole. What a
reader would get wrong: files are never cut, so files can be no more parts than there are files;
rows of a dataset (`tools.preprocessing.dataset_rows`) can be cut anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.preprocessing.documents import TextRule
from tools.preprocessing.encoding import Chunk, read_chunks


class Source(Protocol):
    """Rows in order, from any storage."""

    @property
    def size(self) -> int:
        """The sum of `disk_bytes` over all chunks; for a dataset an estimate of its text."""

    def chunks(self, chunk_size: int) -> Iterator[Chunk]:
        """Yield all rows, `chunk_size` at a time."""

    def split(self, parts: int) -> Sequence["Source"]:
        """Return at most `parts` consecutive parts of about equal size, none of them empty."""

    def identity(self, *, times: bool = True) -> list[Any]:
        """Return JSON that changes with the rows; without `times`, equal on every machine."""

    def __str__(self) -> str:
        """Return the name of the source for messages."""


@dataclass(frozen=True)
class FileSource:
    """The documents of files, in order; `columns` are the fields read of a .parquet file."""

    files: tuple[Path, ...]
    rule: TextRule
    columns: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.files)

    def chunks(self, chunk_size: int) -> Iterator[Chunk]:
        """Yield all documents, `chunk_size` at a time, never of two files."""
        return read_chunks(self.files, self.rule, chunk_size=chunk_size, columns=self.columns)

    def split(self, parts: int) -> list["FileSource"]:
        """Return whole files in parts, each in the part in which its middle byte lies."""
        sizes = [path.stat().st_size for path in self.files]
        total = max(1, sum(sizes))
        groups: dict[int, list[Path]] = {}
        before = 0
        for path, size in zip(self.files, sizes):
            part = min((2 * before + size) * parts // (2 * total), parts - 1)
            groups.setdefault(part, []).append(path)
            before += size
        return [FileSource(tuple(files), self.rule, self.columns) for files in groups.values()]

    def identity(self, *, times: bool = True) -> list[Any]:
        """Return name, size and time of modification of each file."""
        files = [(str(path.resolve()), path.stat()) for path in self.files]
        stamps = [[status.st_size, status.st_mtime_ns if times else 0] for _, status in files]
        return [repr(self.rule), [[name, *stamp] for (name, _), stamp in zip(files, stamps)]]

    def __str__(self) -> str:
        return f"{len(self.files)} files"
