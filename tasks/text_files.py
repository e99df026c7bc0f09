"""Text files as a task reads them, with errors that name the file."""

from pathlib import Path

from megatron.errors import DataError


def read_text(path: Path) -> str:
    """All of a UTF-8 file but its byte order mark; DataError when it cannot be read."""
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
