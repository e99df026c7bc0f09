"""A range of bytes of a file, read as if it were a file of its own.

Formats that put many archives one after the other into a file give their readers one window each.
"""

import io
import os
from pathlib import Path


class FileWindow(io.RawIOBase):
    """The bytes [offset, offset + length) of a file, opened for reading.

    A file that ends earlier makes the window shorter, as for a file that was cut.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        super().__init__()
        self.path = path
        self.offset = offset
        self.length = length
        self._at = 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed by `close`

    def __str__(self) -> str:
        return f"{self.path} at bytes {self.offset} to {self.offset + self.length}"

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to `offset`, counted from the start of the window, the position or the end."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise ValueError(f"a position before the start of {self}")
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Return the position in the window."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from the position on; return the number of bytes that were read."""
        view = memoryview(buffer).cast("B")[: max(0, self.length - self._at)]
        done = os.preadv(self._file.fileno(), [view], self.offset + self._at)
        self._at += done
        return done

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
