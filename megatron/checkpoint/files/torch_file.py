"""Files of torch.save, made durable and digested while they are written; `unpickle` reads them.

For the layouts of other frameworks, which consist of such files. What a reader would get wrong:
torch.save hides the error of a full disk behind one of its own, so the first is kept and raised.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    with DurableFile(path) as file, stream_of(file) as stream:
        torch.save(content, stream)  # type: ignore[arg-type]  # it calls nothing else
    return FileRecord(file.bytes, file.xxh3)


@contextmanager
def stream_of(file: DurableFile) -> Iterator["WriteStream"]:
    """Return `file` as a stream for torch.save; raises the error that torch would hide."""
    stream = WriteStream(file)
    try:
        yield stream
    except RuntimeError as error:
        if stream.failed is None:
            raise
        raise stream.failed from error


class WriteStream:
    """The part of a file's interface that torch.save and torch's distributed checkpoints use."""

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

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        return self._file.bytes

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        """Do nothing: the file is closed, and made durable, by its own block."""
