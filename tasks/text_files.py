"""Text files as a task reads them, with errors that name the file."""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import DataError

_SHOWN = 60  # characters of what is wrong


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file without byte order mark; DataError if unreadable."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = (
            sorted(entry.name for entry in path.parent.glob("*"))[:5]
            if path.parent.is_dir()
            else []
        )
        raise DataError(
            "a file of the task's data does not exist",
            found=f"{path}; beside it: {', '.join(near) or 'nothing'}",
            fix="check the path",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            "a file of the task's data cannot be read",
            found=f"{path}: {error}",
            fix="give a text file in UTF-8",
        ) from error


class Record(NamedTuple):
    """One JSON object, with its file and line."""

    where: str  # file:line
    fields: Mapping[str, Any]

    def text(self, key: str) -> str:
        """Return the text in field `key`; DataError for anything else."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def value(self, key: str) -> Any:
        """Return the value of field `key`; DataError with the nearest names if it is missing."""
        if key in self.fields:
            return self.fields[key]
        near = difflib.get_close_matches(key, self.fields, n=1, cutoff=0.5)
        raise DataError(
            "a line lacks a field that the task reads",
            found=f"{self.where}: no {key!r}; it has {', '.join(map(repr, self.fields)) or 'none'}",
            fix=f"call it {key!r}" + (f", or read {near[0]!r} by its flag" if near else ""),
        )

    def wrong(self, key: str, expected: str) -> DataError:
        """Return the error for a field with another value than `expected`."""
        return DataError(
            f"a field is not {expected}",
            found=f"{self.where}: {key!r} is {json.dumps(self.fields[key])[:_SHOWN]}",
            fix=f"give {expected}",
        )


def read_records(files: Sequence[str]) -> list[Record]:
    """Return the JSON objects of files with one on each line; DataError with file and line."""
    records = []
    for name in files:
        # Not splitlines(): it also breaks at characters that belong to a text, such as U+2028.
        for number, line in enumerate(read_text(Path(name)).split("\n"), start=1):
            if line.strip():
                records.append(parse_record(line, f"{name}:{number}"))
    if not records:
        raise DataError(
            "there is nothing to evaluate", found=", ".join(files), fix="give lines of JSON objects"
        )
    return records


def parse_record(line: str, where: str) -> Record:
    """Return the JSON object in a text, or raise DataError."""
    try:
        fields = json.loads(line)
        reason = f"it is a {type(fields).__name__}"
    except (ValueError, RecursionError) as error:
        fields, reason = None, str(error)
    if not isinstance(fields, dict):
        raise DataError(
            "a line is not a JSON object",
            found=f"{where}: {line[:_SHOWN]!r} ({reason})",
            fix="give one object on each line, such as {...}, with the fields of docs/tasks.md",
        )
    return Record(where, fields)
