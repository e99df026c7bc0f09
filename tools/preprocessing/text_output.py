"""Text files that a tool writes: all of them complete, or none."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from megatron import atomic
from megatron.errors import ConfigError


def refuse_existing_texts(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse existing outputs before any work, unless --overwrite was given."""
    for path in paths:
        if path.exists() and not overwrite:
            raise ConfigError(
                "the output exists",
                found=str(path),
                fix="add --overwrite to replace it, or choose another name for the output",
            )


def write_text_files(contents: Mapping[Path, str]) -> None:
    """Write every file under a temporary name, sync it, then rename all."""
    temporary = {path: atomic.temporary_name(path) for path in contents}
    try:
        for path, text in contents.items():
            try:
                with open(temporary[path], "w", encoding="utf-8", newline="\n") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise atomic.write_error(path, error) from error
        for path in contents:
            atomic.publish_file(temporary[path], path)
    finally:
        for leftover in temporary.values():
            leftover.unlink(missing_ok=True)


class AtomicTextFile:
    """A file that is written in parts, and appears only if the `with` block succeeds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = atomic.temporary_name(path)

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = self._temporary.open("wb")
        except OSError as error:
            raise atomic.write_error(self._path, error) from error
        return self

    def write(self, data: bytes) -> None:
        """Append to the file; MachineError where there is no room."""
        try:
            self._file.write(data)
        except OSError as error:
            raise atomic.write_error(self._path, error) from error

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if kind is None:
                atomic.publish_file(self._temporary, self._path)
        except OSError as error:
            raise atomic.write_error(self._path, error) from error
        finally:
            self._temporary.unlink(missing_ok=True)
