"""Text files that a tool writes: all of them complete, or none."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron import atomic
from megatron.errors import ConfigError


def refuse_existing(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Stop before any work when an output is already there and --overwrite was not given."""
    for path in paths:
        if path.exists() and not overwrite:
            raise ConfigError(
                "the output exists",
                found=str(path),
                fix="add --overwrite to replace it, or choose another name for the output",
            )


def write_text_files(contents: Mapping[Path, str]) -> None:
    """Write every file under a temporary name, force it to disk, then name them all."""
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
            atomic.publish(temporary[path], path)
    finally:
        for leftover in temporary.values():
            leftover.unlink(missing_ok=True)
