"""Images with their classes under one path: folders, archives, and files of MNIST and CIFAR.

Classes of folders are numbered in the order of their names, as torchvision's ImageFolder does.
What a reader would get wrong: files that are broken are left out when a source is opened, so that
positions do not depend on which of them a run happens to draw.
"""

import glob
import gzip
import re
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import log
from megatron.config.models.vision import RGB, ImageCheck
from megatron.data.vision.image_files import (
    ENDINGS,
    ArrayReader,
    FolderReader,
    ImageReader,
    TarMember,
    TarReader,
    ZipReader,
    has_header_of_image,
)
from megatron.errors import DataError

_TRAIN = "train"
_VALID = ("val", "valid", "validation", "test")
_IDX_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
_CIFAR_SIDE = 32
_CIFAR_VALUES = RGB * _CIFAR_SIDE**2
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SHOWN = 5
_PICKLES = (".pkl", ".pickle", ".meta")

Labels = npt.NDArray[np.int64]


class ImagesOfSplits(NamedTuple):
    """The paths of training and validation images that lie under one path."""

    train: str
    valid: str


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Images, and the class of each.

    Attributes:
        positions: of the images in the reader; the source has its own numbers, from 0.
        labels: the class of each image, by its number in `classes`.
        digest: hex digits of the names and sizes of the files.
        stamps: size and time of change of what was listed, by path.
    """

    path: str
    reader: ImageReader
    positions: npt.NDArray[np.int64]
    labels: Labels
    classes: tuple[str, ...]
    digest: str
    stamps: tuple[tuple[str, int, int], ...]

    def __len__(self) -> int:
        return len(self.positions)

    def of(self, chosen: npt.NDArray[np.int64]) -> "ImageSource":
        """Return the source of these of its images."""
        return replace(self, positions=self.positions[chosen], labels=self.labels[chosen])

    def check_unchanged(self) -> None:
        """Raise DataError if a file or a folder that was listed has changed since."""
        for path, size, changed in self.stamps:
            if _stamp(path) != (path, size, changed):
                raise DataError(
                    "images changed while they were read",
                    found=path,
                    fix="leave files of images alone while a run reads them, and start it again",
                )


def open_images(
    path: str, *, check: ImageCheck = ImageCheck.HEADER, max_broken: int = 0
) -> ImageSource:
    """Return the images under a path of any kind that is known.

    Raises:
        DataError: there are none, or more files than `max_broken` are broken.
    """
    return _without_broken(_opened(path), check, max_broken)


def image_digest(path: str) -> str | None:
    """Return the digest of the images under a path; None where there are none."""
    try:
        return _opened(path).digest
    except (OSError, DataError):
        return None


def splits_under(path: str) -> ImagesOfSplits | None:
    """Return the parts of a path that holds training and validation images apart; else None."""
    archive, inner = _zip_and_inner(path)
    if archive is not None:
        inside = {name.split("/")[0] for name in _below(_zip_names(archive), inner)}
        return _named_splits(f"{archive}/{inner}", inside)
    folder = Path(path)
    if not folder.is_dir():
        return None
    names = {entry.name for entry in folder.iterdir()}
    images = sorted(name for name in names if _IDX_IMAGES.search(name))
    ours = [name for name in images if name.startswith("train")]
    others = [name for name in images if name.startswith("t10k")]
    if len(ours) == len(others) == 1:
        return ImagesOfSplits(f"{path}/{ours[0]}", f"{path}/{others[0]}")
    if "test_batch.bin" in names:
        return ImagesOfSplits(f"{path}/data_batch_*.bin", f"{path}/test_batch.bin")
    if {"train.bin", "test.bin"} <= names:
        return ImagesOfSplits(f"{path}/train.bin", f"{path}/test.bin")
    return _named_splits(path, {name for name in names if (folder / name).is_dir()})


def _named_splits(path: str, folders: set[str]) -> ImagesOfSplits | None:
    valid = [name for name in _VALID if name in folders]
    if _TRAIN not in folders or not valid:
        return None
    root = path.rstrip("/")
    return ImagesOfSplits(f"{root}/{_TRAIN}", f"{root}/{valid[0]}")


def _opened(path: str) -> ImageSource:
    archive, inner = _zip_and_inner(path)
    if archive is not None:
        return _open_zip(path, archive, inner)
    files = _files_of_pattern(path)
    if not files:
        raise DataError(
            "there are no images at a path",
            found=f"no file or folder {path}",
            fix="give --data-path a folder of class folders, a .zip of these, .tar shards, or a "
            "file of MNIST or CIFAR",
        )
    if len(files) == 1 and Path(files[0]).is_dir():
        return _open_folder(files[0])
    name = Path(files[0]).name
    if _IDX_IMAGES.search(name) and len(files) == 1:
        return _open_idx(files[0])
    if name.endswith(".tar"):
        return _open_tar(path, files)
    if name.endswith(".bin"):
        return _open_cifar(path, files)
    if name.endswith(_PICKLES) or re.fullmatch(r"data_batch_\d|test_batch|train|test", name):
        raise _pickled(path)
    raise DataError(
        "a file is of no kind that images are read from",
        found=path,
        fix="give a folder of class folders, .zip, .tar, *-images-idx3-ubyte(.gz) or CIFAR's .bin",
    )


def _open_folder(path: str) -> ImageSource:
    root = Path(path)
    entries = sorted(root.iterdir())
    names = [entry.name for entry in entries if entry.is_file()]
    images = [name for name in names if _IDX_IMAGES.search(name)]
    if len(images) == 1:
        return _open_idx(str(root / images[0]))
    for ending, opener in ((".tar", _open_tar), (".bin", _open_cifar)):
        files = [str(root / name) for name in names if name.endswith(ending)]
        if files:
            return opener(path, files)
    if any(name.startswith("data_batch") or name.endswith(_PICKLES) for name in names):
        raise _pickled(path)
    folders = [entry for entry in entries if entry.is_dir()]
    files = [
        str(file.relative_to(root))
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]
    sizes = {name: (root / name).stat().st_size for name in files}
    listed = _of_class_folders(path, files, [folder.name for folder in folders])
    reader = FolderReader(path.rstrip("/"), listed.files)
    return _source(path, reader, listed, [*map(str, folders)], sizes)


def _open_zip(path: str, archive: str, inner: str) -> ImageSource:
    names = sorted(name for name in _below(_zip_names(archive), inner) if not name.endswith("/"))
    folders = sorted({name.split("/")[0] for name in names if "/" in name})
    listed = _of_class_folders(path, names, folders)
    with zipfile.ZipFile(archive) as opened:
        sizes = {info.filename: info.CRC for info in opened.infolist()}
    members = [f"{inner}/{name}" if inner else name for name in listed.files]
    return _source(path, ZipReader(archive, members), listed, [archive], sizes)


class _Listed(NamedTuple):
    """The image files of class folders, and the class of each."""

    files: list[str]
    labels: list[int]
    classes: tuple[str, ...]


def _of_class_folders(path: str, files: Sequence[str], folders: Sequence[str]) -> _Listed:
    """Return the files that end as images do; all others are counted in the log."""
    number = {name: at for at, name in enumerate(folders)}
    kept = [
        name
        for name in files
        if PurePosixPath(name).suffix.lower() in ENDINGS and name.split("/")[0] in number
    ]
    if len(kept) < len(files):
        other = next(name for name in files if name not in set(kept))
        log.info(f"{path}: {len(files) - len(kept)} files that are no images, such as {other}")
    labels = [number[name.split("/")[0]] for name in kept]
    empty = sorted(set(folders) - {folders[label] for label in labels})
    if not folders or empty:
        raise DataError(
            "a folder of images has a folder for each class, with images in each",
            found=f"{path}: "
            + (f"no image in {', '.join(empty[:_SHOWN])}" if empty else "no folder in it"),
            fix="put the images of each class into a folder with its name, such as "
            f"{path.rstrip('/')}/cat/1.jpg, and remove empty folders",
        )
    return _Listed(kept, labels, tuple(folders))


def _open_tar(path: str, files: Sequence[str]) -> ImageSource:
    """Open webdataset's shards: NAME.jpg and NAME.cls, a number, are one sample."""
    members: list[TarMember] = []
    labels: list[int] = []
    for at, file in enumerate(files):
        found: dict[str, TarMember] = {}
        classes: dict[str, int] = {}
        try:
            with tarfile.open(file, "r:") as archive:
                for info in filter(tarfile.TarInfo.isfile, archive):
                    key, ending = _key_and_ending(info.name)
                    if ending == "cls":
                        opened = archive.extractfile(info)
                        text = opened.read() if opened else b""
                        classes[key] = _class_number(text, f"{file}/{info.name}")
                    elif f".{ending}" in ENDINGS:
                        found[key] = TarMember(at, info.name, info.offset_data, info.size)
        except (OSError, tarfile.TarError) as error:
            raise DataError(
                "a shard of images is no tar archive, or is cut short",
                found=f"{file}: {error}",
                fix="copy it again; shards are not compressed",
            ) from error
        lone = sorted(found.keys() ^ classes.keys())
        if lone or not found:
            raise DataError(
                "a sample of a shard has an image and a class, NAME.jpg and NAME.cls",
                found=f"{file}: {len(lone)} without one of them"
                + (f", such as {lone[0]}" if lone else "; no samples at all"),
                fix="write both for each sample",
            )
        members += found.values()
        labels += [classes[key] for key in found]
    names = tuple(map(str, range(max(labels) + 1)))
    listed = _Listed([member.name for member in members], labels, names)
    sizes = {f"{m.archive}/{m.name}": m.size for m in members}
    return _source(path, TarReader(tuple(files), members), listed, files, sizes)


def _key_and_ending(name: str) -> tuple[str, str]:
    """Return the parts of a member's name before and behind the first dot of its last part."""
    folder, _, last = name.rpartition("/")
    key, _, ending = last.partition(".")
    return f"{folder}/{key}", ending.lower()


def _class_number(text: bytes, name: str) -> int:
    if not text.strip().isdigit():
        raise DataError(
            "the class of a sample is not a whole number",
            found=f"{name}: {text[:20]!r}",
            fix="write classes as numbers from 0",
        )
    return int(text)


def _open_idx(path: str) -> ImageSource:
    """Open MNIST's images; their labels lie beside them (yann.lecun.com/exdb/mnist)."""
    beside = re.sub("images([-.])idx3", r"labels\1idx1", Path(path).name)
    images = _idx(Path(path), dimensions=3)
    labels = _idx(Path(path).with_name(beside), dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            "files of images and of their labels differ in length",
            found=f"{path}: {len(images)} images, {beside}: {len(labels)} labels",
            fix="copy both of the same release",
        )
    return _of_arrays(path, images, labels, [path, str(Path(path).with_name(beside))])


def _idx(path: Path, *, dimensions: int) -> npt.NDArray[np.uint8]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise _wrong_file(str(path), str(error)) from error
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes((0, 0, 8, dimensions)):
        raise _wrong_file(str(path), f"it begins with {data[:4].hex() or 'nothing'}")
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) - head != np.prod(shape):
        raise _wrong_file(str(path), f"{len(data) - head} values, and its header says {shape}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def _open_cifar(path: str, files: Sequence[str]) -> ImageSource:
    """Open CIFAR's binary files: one or two bytes of labels before each image's planes."""
    images, labels = [], []
    for file in files:
        data = np.fromfile(file, np.uint8)
        bytes_of_labels = [n for n in (1, 2) if len(data) and not len(data) % (n + _CIFAR_VALUES)]
        if not bytes_of_labels:
            record = f"records of {_CIFAR_VALUES} values with one or two labels"
            raise _wrong_file(file, f"{len(data)} bytes are no {record}")
        rows = data.reshape(-1, bytes_of_labels[0] + _CIFAR_VALUES)
        labels.append(rows[:, bytes_of_labels[0] - 1])  # of CIFAR-100 the fine ones
        planes = rows[:, bytes_of_labels[0] :].reshape(-1, RGB, _CIFAR_SIDE, _CIFAR_SIDE)
        images.append(planes.transpose(0, 2, 3, 1))
    return _of_arrays(path, np.concatenate(images), np.concatenate(labels), files)


def _of_arrays(
    path: str,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.uint8],
    files: Sequence[str],
) -> ImageSource:
    digest = xxhash.xxh3_128_hexdigest(images.tobytes() + labels.tobytes())
    classes = tuple(map(str, range(int(labels.max()) + 1)))
    return ImageSource(
        path=path,
        reader=ArrayReader(path, np.ascontiguousarray(images)),
        positions=np.arange(len(images)),
        labels=labels.astype(np.int64),
        classes=classes,
        digest=digest,
        stamps=tuple(map(_stamp, files)),
    )


def _source(
    path: str,
    reader: ImageReader,
    listed: _Listed,
    listed_in: Iterable[str],
    sizes: dict[str, int],
) -> ImageSource:
    described = "\n".join(f"{name} {size}" for name, size in sorted(sizes.items()))
    return ImageSource(
        path=path,
        reader=reader,
        positions=np.arange(len(listed.files)),
        labels=np.array(listed.labels, dtype=np.int64),
        classes=listed.classes,
        digest=xxhash.xxh3_128_hexdigest(described.encode()),
        stamps=tuple(map(_stamp, listed_in)),
    )


def _without_broken(source: ImageSource, check: ImageCheck, most: int) -> ImageSource:
    broken = dict(_broken(source, check))
    if len(broken) > most:
        shown = "; ".join(list(broken.values())[:_SHOWN])
        raise DataError(
            "files are no images, or are broken",
            found=f"{source.path}: {len(broken)} of {len(source)}: {shown}"
            + ("; .." if len(broken) > _SHOWN else ""),
            fix=f"remove or replace them, or leave them out with --max-broken-images {len(broken)}",
        )
    if not broken:
        return source
    log.warning(
        f"{source.path}: left out {len(broken)} broken images: {'; '.join(broken.values())}"
    )
    return source.of(np.setdiff1d(np.arange(len(source)), list(broken)))


def _broken(source: ImageSource, check: ImageCheck) -> Iterator[tuple[int, str]]:
    reader = source.reader
    for at in range(len(source)):
        try:
            header = reader.header(at)
            if header is None:
                return
            if not has_header_of_image(header):
                yield at, f"{reader.name(at)} (begins with {header[:4]!r})"
            elif check is ImageCheck.FULL:
                reader.read(at, RGB)
        except DataError as error:
            yield at, str(error.found)


def _zip_and_inner(path: str) -> tuple[str | None, str]:
    """Return the archive of a path such as images.zip/train, and the folder within it."""
    parts = path.rstrip("/").split("/")
    for at, part in enumerate(parts):
        archive = "/".join(parts[: at + 1])
        if part.lower().endswith(".zip") and Path(archive).is_file():
            return archive, "/".join(parts[at + 1 :]) or _only_folder(archive)
    return None, ""


def _only_folder(archive: str) -> str:
    """Return the folder that all of an archive lies in, if it holds the splits or the classes."""
    tops = {name.split("/")[0] for name in _zip_names(archive) if name}
    below = {name.split("/")[1] for name in _zip_names(archive) if name.count("/") > 1}
    return tops.pop() if len(tops) == 1 and below else ""


def _zip_names(archive: str) -> list[str]:
    try:
        with zipfile.ZipFile(archive) as opened:
            return opened.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise _wrong_file(archive, str(error)) from error


def _below(names: Iterable[str], folder: str) -> list[str]:
    start = f"{folder}/" if folder else ""
    return [name.removeprefix(start) for name in names if name.startswith(start) and name != start]


def _files_of_pattern(path: str) -> list[str]:
    braces = _BRACES.search(path)
    if braces:
        low, high = braces.groups()
        numbers = (str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
        expanded = [path[: braces.start()] + n + path[braces.end() :] for n in numbers]
        missing = [file for file in expanded if not Path(file).exists()]
        if missing:
            raise _wrong_file(missing[0], f"there is no such shard of {path}")
        return expanded
    return sorted(glob.glob(path)) if "*" in path else [path] if Path(path).exists() else []


def _stamp(path: str) -> tuple[str, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return path, -1, -1
    return path, found.st_size, found.st_mtime_ns


def _pickled(path: str) -> DataError:
    return DataError(
        "files of Python pickles are not read: reading one runs what is in it",
        found=path,
        fix="take CIFAR's binary version (cifar-10-binary.tar.gz, .bin files), or write the "
        "images into class folders",
    )


def _wrong_file(path: str, reason: str) -> DataError:
    return DataError(
        "a file of images cannot be read",
        found=f"{path}: {reason}",
        fix="copy it again, whole, and keep its name",
    )
