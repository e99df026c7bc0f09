"""Which documents the input files of a tool hold, read as a stream with their line numbers.

`.jsonl` and `.json` files hold one JSON object a line; how a `.txt` file is cut into documents is a
`TextRule`. Both may be compressed (`.gz`, `.zst`). A compressed file that ends too early is an
error here, though the libraries would end it quietly. Rows of a `.parquet` file become such JSON
lines (`parquet_rows`). Parsing is left to the receiver of the row, in any process.
"""

import difflib
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from megatron import log
from megatron.errors import ConfigError, DataError
from tools.preprocessing.parquet_rows import parquet_rows, require_parquet

PARQUET = ".parquet"
SUFFIXES = (
    *(kind + packing for kind in (".jsonl", ".json", ".txt") for packing in ("", ".gz", ".zst")),
    PARQUET,
)
TEXT_RULES = ("separator", "file", "lines", "paragraphs")
# A document is held in memory whole, and a tokenizer needs many times its size.
MAX_DOCUMENT_BYTES = 256 << 20
_BOM = b"\xef\xbb\xbf"


class InputFiles(NamedTuple):
    """The files to read, in reading order, and those of a folder that were skipped."""

    files: tuple[Path, ...]
    passed_over: tuple[Path, ...]


class DocumentRow(NamedTuple):
    """One document as in its file, and the line on which it starts (from 1)."""

    line: int
    data: bytes


@dataclass(frozen=True)
class TextRule:
    """The rule that cuts a .txt file into documents.

    `separator`: at lines that hold nothing but the separator, so a file without one is one
    document; blank lines around a document go. `file`: never. `lines`: each line that is not
    blank. `paragraphs`: at blank lines.
    """

    rule: str = "separator"
    separator: str = "<|endoftext|>"


def find_inputs(given: Sequence[str]) -> InputFiles:
    """Return the files that the paths name; those of a folder in sorted order.

    Links to folders are followed, each folder once; one that leads back to a folder above itself
    is refused, and so is a link to nothing that is named like an input.
    """
    files: list[Path] = []
    passed_over: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(_visible_files(path, _Visited()))
            readable = [p for p in inside if p.name.endswith(SUFFIXES)]
            passed_over += [p for p in inside if not p.name.endswith(SUFFIXES)]
            if not readable:
                raise DataError(
                    "the input folder holds no file that can be read",
                    found=f"{path} with {len(inside)} other files",
                    fix=f"name the files {', '.join(SUFFIXES)}",
                )
            files += readable
        elif not path.exists():
            raise DataError(
                "the input does not exist",
                found=f"{path} (from {Path.cwd()})",
                fix="give the path of a file or a folder",
            )
        elif not path.name.endswith(SUFFIXES):
            raise ConfigError(
                "the name of the input does not show its format",
                found=str(path),
                fix=f"rename it to end in one of {', '.join(SUFFIXES)}",
            )
        else:
            files.append(path)
    for path in files:
        if path.suffix == PARQUET:
            require_parquet(path)
    return InputFiles(tuple(files), tuple(passed_over))


def is_text(path: Path) -> bool:
    """Return whether the file has plain text, not JSON lines."""
    return ".txt" in path.suffixes[-2:]


class DocumentFile:
    """One input file, iterated once for its rows; blank JSON lines are skipped."""

    def __init__(
        self,
        path: Path,
        rule: TextRule | None = None,
        *,
        limit: int | None = None,
        columns: Sequence[str] = ("text",),
    ) -> None:
        self.path = path
        self._columns = columns  # of a .parquet file
        self._rule = rule or TextRule()
        self._limit = MAX_DOCUMENT_BYTES if limit is None else limit
        self._file: BinaryIO | None = None
        self.size_bytes = path.stat().st_size
        self.read_bytes = 0  # of the file as it lies on disk, for progress

    def __iter__(self) -> Iterator[DocumentRow]:
        if self.path.suffix == PARQUET:
            yield from self._parquet()
            return
        with self.path.open("rb") as self._file:
            lines = self._lines(self._file)
            rows: Iterator[DocumentRow]
            if not is_text(self.path):
                rows = (DocumentRow(line, data) for line, data in lines if not data.isspace())
            elif self._rule.rule == "lines":
                rows = (
                    DocumentRow(n, data.rstrip(b"\r\n")) for n, data in lines if not data.isspace()
                )
            else:
                rows = self._joined(lines)
            for row in rows:
                self.read_bytes = self._file.tell()
                yield row
        self.read_bytes = self.size_bytes

    def _parquet(self) -> Iterator[DocumentRow]:
        for number, (data, share) in enumerate(parquet_rows(self.path, self._columns), start=1):
            self._check_size(number, len(data))
            self.read_bytes = int(share * self.size_bytes)
            yield DocumentRow(number, data)

    def _joined(self, lines: Iterator[tuple[int, bytes]]) -> Iterator[DocumentRow]:
        """Yield documents of several lines: `separator`, `paragraphs` and `file`."""
        separator = self._rule.separator.encode()
        first, parts, size = 1, list[bytes](), 0
        for number, data in lines:
            stripped = data.strip()
            if self._rule.rule == "paragraphs":
                ends = not stripped
            else:
                ends = self._rule.rule == "separator" and stripped == separator
            if ends:
                if self._rule.rule == "separator" or parts:
                    yield DocumentRow(first, b"".join(parts).strip(b"\r\n"))
                first, parts, size = number + 1, [], 0
                continue
            parts.append(data)
            size += len(data)
            self._check_size(first, size)
        last = b"".join(parts)
        if self._rule.rule == "file":
            yield DocumentRow(first, last)
        elif last.strip():
            yield DocumentRow(first, last.strip(b"\r\n"))

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yield numbered lines from 1 with their ends, without a byte-order mark."""
        try:
            stream = _unpacked(self.path, file)
            number = 0
            while line := stream.readline(self._limit + 1):
                number += 1
                self._check_size(number, len(line))
                yield number, line.removeprefix(_BOM) if number == 1 else line
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise DataError(
                "the compressed file is damaged or was not copied whole",
                found=f"{self.path}: {error}",
                fix="copy the file again and compare checksums",
            ) from error

    def _check_size(self, line: int, size: int) -> None:
        if size > self._limit:
            raise DataError(
                f"one document is larger than {self._limit} bytes",
                found=f"{self.path}:{line}",
                fix="cut it into documents: one JSON object a line, or for .txt "
                "--text-documents lines or paragraphs",
            )


def text_of(path: Path, row: DocumentRow) -> str:
    """Return the row as text; UTF-8 is the only encoding."""
    try:
        return row.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = row.line + row.data.count(b"\n", 0, error.start)
        raise DataError(
            "the text is not UTF-8",
            found=f"{path}:{line}: byte 0x{row.data[error.start]:02x} ({error.reason})",
            fix=f"convert the file, for example: iconv -f LATIN1 -t UTF-8 {path}",
        ) from error


def fields_of(path: Path, row: DocumentRow, keys: Sequence[str]) -> list[str]:
    """Return the strings of a JSON row under `keys`."""
    record = record_of(path, row)
    return [_field(f"{path}:{row.line}", record, key) for key in keys]


def record_of(path: Path, row: DocumentRow) -> dict[str, object]:
    """Return the JSON object of a row."""
    place = f"{path}:{row.line}"
    try:
        record = json.loads(text_of(path, row))
    except (ValueError, RecursionError) as error:
        raise DataError(
            "the line is not valid JSON",
            found=f"{place}: {error}",
            fix="write one complete JSON object a line (JSON Lines)",
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            "the line is not a JSON object",
            found=f"{place}: a {type(record).__name__}",
            fix="write one JSON object a line (JSON Lines), not one array for the whole file",
        )
    return record


def texts(files: Sequence[Path], key: str, rule: TextRule) -> Iterator[tuple[DocumentFile, str]]:
    """Yield the text of every document of the files, with its file (for progress)."""
    for path in files:
        source = DocumentFile(path, rule, columns=[key])
        for row in source:
            yield source, text_of(path, row) if is_text(path) else fields_of(path, row, [key])[0]


def _field(place: str, record: dict[str, object], key: str) -> str:
    if key not in record:
        near = difflib.get_close_matches(key, record, n=1)
        raise DataError(
            f"the line has no key {key!r}",
            found=f"{place}: keys {', '.join(map(repr, record)) or '(none)'}",
            fix=f"use --json-keys {near[0] if near else next(iter(record), 'KEY')}",
        )
    value = record[key]
    if not isinstance(value, str):
        raise DataError(
            f"the value of {key!r} is not a string",
            found=f"{place}: {type(value).__name__}",
            fix="write the text as a JSON string, or name another key with --json-keys",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the value of {key!r} has half of a surrogate pair, which is no character",
            found=f"{place}: \\u{ord(value[error.start]):04x} at character {error.start}",
            fix="repair the escape (an emoji is two \\u escapes), or drop the line",
        ) from error
    return value


class _Visited:
    """Folders by identity rather than by name: those seen, and those being read."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()
        self._open: list[tuple[int, int]] = []

    @contextmanager
    def enter(self, folder: Path) -> Iterator[bool]:
        """Yield whether the folder is new; DataError if it contains itself."""
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in self._open:
            raise DataError(
                "a link in the input folder leads back to a folder that it is in",
                found=f"{folder} is {folder.resolve()}",
                fix="remove the link, or give the folders that are meant one by one",
            )
        is_new = identity not in self._seen
        self._seen.add(identity)
        self._open.append(identity)
        try:
            yield is_new
        finally:
            self._open.pop()


def _visible_files(folder: Path, visited: _Visited) -> Iterator[Path]:
    with visited.enter(folder) as is_new:
        if not is_new:
            log.warning(f"passed over {folder}: {folder.resolve()} is read under another name")
            return
        try:
            names = sorted(path.name for path in folder.iterdir())
        except OSError as error:
            raise DataError(
                "an input folder cannot be read",
                found=f"{folder}: {error.strerror}",
                fix="check its permissions",
            ) from error
        for path in (folder / name for name in names if not name.startswith(".")):
            if path.is_dir():
                yield from _visible_files(path, visited)
            elif path.is_file():
                yield path
            elif path.is_symlink() and path.name.endswith(SUFFIXES):
                raise DataError(
                    "an input is a link to a file that does not exist",
                    found=f"{path} -> {path.readlink()}",
                    fix="restore the file, or remove the link",
                )


def _unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]  # has readline
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdStream(file), 1 << 20)  # type: ignore[type-var]  # is raw
    return file


class _ZstdStream(io.RawIOBase):
    """A stream of decompressed frames that raises an error for an incomplete last frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # 2 GiB windows: what `zstd --long=31` writes.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._ready:
            packed = b""
            if self._frame is not None and self._frame.eof:
                packed, self._frame = self._frame.unused_data, None
            packed = packed or self._file.read(1 << 16)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = self._frame.decompress(packed)
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)
