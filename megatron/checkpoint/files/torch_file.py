"""Files of torch.save, made durable and digested while they are written; `unpickle` reads them.

For the layouts of other frameworks, which consist of such files. What a reader would get wrong:
torch.save hides the error of a full disk behind one of its own, so the first is kept and raised.
"""

from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files.durable import DurableFile
from megatron.checkpoint.folder.manifest import FileRecord


def save(path: Path, content: Any) -> FileRecord:
    """Write a new file as torch.save does, durably; returns its length and digest.

    Raises:
        OSError: it could not be written; it names the file.
    """
    with DurableFile(path) as file:
        stream = _Stream(file)
        try:
            torch.save(content, stream)  # type: ignore[arg-type]  # it calls nothing else
        except RuntimeError as error:
            if stream.failed is None:
                raise
            raise stream.failed from error
    return FileRecord(file.bytes, file.xxh3)


class _Stream:
    """The part of a file's interface that torch.save uses."""

    def __init__(self, file: DurableFile) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`; returns its bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            self.failed = self.failed or error
            raise
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
