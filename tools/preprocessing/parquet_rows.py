"""Rows of a `.parquet` file as JSON lines, by the optional package pyarrow.

A row is numbered from 1 as a line is. What a reader would get wrong: pyarrow does not check that
a text column is UTF-8, so the columns are read as bytes and checked where all rows are.
"""

import difflib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megatron.errors import ConfigError, DataError

_BATCH_ROWS = 1024
_TEXT_TYPES = ("string", "large_string")


def require_parquet(path: Path) -> ModuleType:
    """Return the module that reads `path`; ConfigError with the way to install it."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "a .parquet file is read by the package pyarrow, which is not installed",
            found=f"{path}: {error}",
            fix="pip install pyarrow, or write the rows as .jsonl",
        ) from error


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[bytes, float]]:
    """Yield each row as a JSON object of `columns`, with the share of rows read so far."""
    module = require_parquet(path)
    try:
        file = module.ParquetFile(path)
        total = max(1, file.metadata.num_rows)
        _check_columns(path, file.schema_arrow, columns)
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns)):
            cells = [batch.column(name).cast("large_binary").to_pylist() for name in columns]
            for row in zip(*cells):
                number += 1
                yield _as_json(columns, row), number / total
    except (ValueError, OSError) as error:  # what pyarrow's own errors are
        raise DataError(
            "the .parquet file is damaged or was not copied whole",
            found=f"{path}: {error}",
            fix="copy the file again and compare checksums",
        ) from error


def _as_json(columns: Sequence[str], row: Sequence[bytes | None]) -> bytes:
    try:
        texts = [None if cell is None else cell.decode("utf-8") for cell in row]
    except UnicodeDecodeError:
        return b"".join(cell or b"" for cell in row)  # refused when it is decoded
    return json.dumps(dict(zip(columns, texts)), ensure_ascii=False).encode()


def _check_columns(path: Path, schema: object, columns: Sequence[str]) -> None:
    names: list[str] = schema.names  # type: ignore[attr-defined]  # a pyarrow.Schema
    for name in columns:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise DataError(
                f"the .parquet file has no column {name!r}",
                found=f"{path}: columns {', '.join(map(repr, names)) or '(none)'}",
                fix=f"use --json-keys {near[0] if near else next(iter(names), 'COLUMN')}",
            )
        kind = str(schema.field(name).type)  # type: ignore[attr-defined]
        if kind not in _TEXT_TYPES:
            raise DataError(
                f"the column {name!r} does not hold text",
                found=f"{path}: {kind}",
                fix="store it as a string column, or name another with --json-keys",
            )
