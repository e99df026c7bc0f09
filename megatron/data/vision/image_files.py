"""Reads images one by one from folders, archives and arrays, as Pillow's images.

No file is unpickled. Pillow is imported where an image is decoded, so that flags and listings need
no package beside ours. What a reader would get wrong: a reader is copied into worker processes, so
archives are opened by each process for itself.
"""

import io
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError, MachineError

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".png",
        ".bmp",
        ".gif",
        ".ppm",
        ".pgm",
        ".webp",
        ".tif",
        ".tiff",
    ]  # in lower case
)
MODES = {1: "L", 3: "RGB"}  # Pillow's names, by the number of channels
# How files of these formats begin; WebP has its name at byte 8.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8", b"P5", b"P6", b"II*\0", b"MM\0*")
_HEADER_BYTES = 12


class ImageReader(Protocol):
    """Images by position."""

    def read(self, at: int, channels: int) -> "Image.Image":
        """Return one image with 1 or 3 channels; raises DataError for what is no image."""

    def header(self, at: int) -> bytes | None:
        """Return the first bytes of a file; None where there are no files to be broken."""

    def name(self, at: int) -> str:
        """Return what a user would call the image."""


@dataclass(frozen=True, slots=True)
class FolderReader:
    """Files of a folder, by their paths below it."""

    folder: str
    files: Sequence[str]

    def read(self, at: int, channels: int) -> "Image.Image":
        """Return one image; raises DataError for what is no image."""
        return decoded(_bytes_of(Path(self.name(at))), channels, self.name(at))

    def header(self, at: int) -> bytes:
        """Return the first bytes of a file."""
        return _bytes_of(Path(self.name(at)), _HEADER_BYTES)

    def name(self, at: int) -> str:
        """Return the path of a file."""
        return f"{self.folder}/{self.files[at]}"


@dataclass(slots=True)
class ZipReader:
    """Members of a zip archive, by their names in it."""

    path: str
    members: Sequence[str]
    _open: tuple[int, zipfile.ZipFile] | None = field(default=None, init=False, repr=False)

    def read(self, at: int, channels: int) -> "Image.Image":
        """Return one image; raises DataError for what is no image."""
        return decoded(self._bytes(at, -1), channels, self.name(at))

    def header(self, at: int) -> bytes:
        """Return the first bytes of a member."""
        return self._bytes(at, _HEADER_BYTES)

    def name(self, at: int) -> str:
        """Return the path of the archive, and the name within it."""
        return f"{self.path}/{self.members[at]}"

    def _bytes(self, at: int, count: int) -> bytes:
        if self._open is None or self._open[0] != os.getpid():
            self._open = (os.getpid(), zipfile.ZipFile(self.path))
        try:
            with self._open[1].open(self.members[at]) as member:
                return member.read(count)
        except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise broken_image(self.name(at), str(error)) from error

    def __getstate__(self) -> tuple[str, Sequence[str]]:
        return self.path, self.members  # not the open archive

    def __setstate__(self, state: tuple[str, Sequence[str]]) -> None:
        (self.path, self.members), self._open = state, None


class TarMember(NamedTuple):
    """Where a file lies within an archive that is not compressed."""

    archive: int
    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TarReader:
    """Members of tar archives, read at their places."""

    archives: Sequence[str]
    members: Sequence[TarMember]

    def read(self, at: int, channels: int) -> "Image.Image":
        """Return one image; raises DataError for what is no image."""
        return decoded(self._bytes(at, self.members[at].size), channels, self.name(at))

    def header(self, at: int) -> bytes:
        """Return the first bytes of a member."""
        return self._bytes(at, min(self.members[at].size, _HEADER_BYTES))

    def name(self, at: int) -> str:
        """Return the path of the archive, and the name within it."""
        member = self.members[at]
        return f"{self.archives[member.archive]}/{member.name}"

    def _bytes(self, at: int, count: int) -> bytes:
        member = self.members[at]
        try:
            with open(self.archives[member.archive], "rb") as file:
                file.seek(member.offset)
                return file.read(count)
        except OSError as error:
            raise broken_image(self.name(at), str(error)) from error


@dataclass(frozen=True, slots=True)
class ArrayReader:
    """Images of a file that holds nothing but their values."""

    path: str
    images: npt.NDArray[np.uint8]  # [n, height, width] or [n, height, width, 3]

    def read(self, at: int, channels: int) -> "Image.Image":
        """Return one image."""
        require_pillow()
        from PIL import Image

        return Image.fromarray(self.images[at]).convert(MODES[channels])

    def header(self, at: int) -> None:
        """Return None: the file was read as a whole."""

    def name(self, at: int) -> str:
        """Return the path of the file, and the number of the image."""
        return f"{self.path} image {at}"


def has_header_of_image(header: bytes) -> bool:
    """Return whether a file with these first bytes is of a format of images."""
    is_webp = header[:4] == b"RIFF" and header[8:12] == b"WEBP"
    return is_webp or header.startswith(_BEGINNINGS)


def decoded(data: bytes, channels: int, name: str) -> "Image.Image":
    """Return an encoded image with 1 or 3 channels; raises DataError for what is no image."""
    require_pillow()
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert(MODES[channels])
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise broken_image(name, str(error)) from error


def broken_image(name: str, reason: str) -> DataError:
    """Return the error about a file that is no image, or cannot be read to its end."""
    return DataError(
        "a file is no image, or is broken",
        found=f"{name}: {reason}",
        fix="remove it or replace it; --image-check full finds all such files before training, "
        "and --max-broken-images N leaves out up to N of them",
    )


def require_pillow() -> None:
    """Raise MachineError unless Pillow can be imported."""
    try:
        import PIL.Image  # noqa: F401  # where it is missing, this says so
    except ImportError as error:
        raise MachineError(
            "images are read by Pillow, which is not installed",
            found=str(error),
            fix="pip install pillow, or pip install 'megatron-verified[vision]'",
        ) from error


def _bytes_of(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise broken_image(str(path), error.strerror or str(error)) from error
