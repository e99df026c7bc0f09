"""The `.idx` file: its layout, and the checks that a reader makes before it uses a number.

34 bytes of header, then sizes, byte offsets and document borders (docs/data.md). What a reader
would get wrong: nothing is aligned, so the arrays of a mapped index are unaligned views.
`indexed_dataset` reads tokens and writes corpora.
"""

import os
import struct
from itertools import accumulate
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of items, len(doc_idx)
DTYPE_OF_CODE: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_FLOAT_CODES = (6, 7)  # 7 is float32 in some writers and float64 in others; tokens are neither

# The index is read into memory up to this size and mapped above it: reading cannot SIGBUS, but a
# copy per process of an index of a hundred million items would not fit beside eight ranks.
_MOST_INDEX_BYTES_READ = 64 * 2**20


class Stamp(NamedTuple):
    """The identity of one state of a file, found without reading it."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Index(NamedTuple):
    """The checked content of an `.idx` file."""

    dtype: np.dtype[np.integer]
    sizes: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    doc_idx: npt.NDArray[np.int64]
    stamp: Stamp
    modes: npt.NDArray[np.int8] | None = None  # of each item, in corpora of several modes


class Writable(Protocol):
    """The interface of a file that an index is written to."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Take the next bytes."""


def read_index(path: str) -> Index:
    """Read or map the index at `path` and check all of it; raises DataError for what is wrong."""
    descriptor = open_to_read(path)
    with os.fdopen(descriptor, "rb") as file:
        stamp = Stamp.of(os.fstat(file.fileno()))
        header = _check_header(path, file.read(HEADER.size), stamp)
        shapes = header.shapes
        if stamp.size_bytes <= _MOST_INDEX_BYTES_READ:
            arrays = [np.fromfile(file, kind, count) for kind, count in shapes]
        else:
            buffer = np.memmap(file, np.uint8, "r")
            lengths = [np.dtype(kind).itemsize * count for kind, count in shapes]
            arrays = [
                np.frombuffer(buffer, kind, count, start)
                for start, (kind, count) in zip(accumulate(lengths, initial=HEADER.size), shapes)
            ]
    sizes, pointers, doc_idx, *modes = arrays
    index = Index(header.dtype, sizes, pointers, doc_idx, stamp, modes[0] if modes else None)
    check_index_arrays(path, index)
    return index


def check_index_arrays(path: str, index: Index) -> None:
    """Raise DataError if the numbers of an index contradict each other; else freeze them."""
    for array in (index.sizes, index.pointers, index.doc_idx, index.modes):
        if array is not None:
            array.flags.writeable = False
    _check_sizes(path, index.sizes, index.pointers, index.dtype)
    _check_documents(path, index.doc_idx, len(index.sizes))


def write_index(
    file: Writable,
    dtype: "np.dtype[np.integer]",
    sizes: npt.NDArray[np.int32],
    doc_idx: npt.NDArray[np.int64],
) -> None:
    """Write a whole index: the byte offsets follow from `sizes` and the width of `dtype`."""
    file.write(HEADER.pack(MAGIC, VERSION, index_code_of(dtype), len(sizes), len(doc_idx)))
    file.write(sizes.astype("<i4", copy=False).data.cast("B"))
    file.write(item_starts(sizes, dtype).astype("<i8", copy=False).data.cast("B"))
    file.write(doc_idx.astype("<i8", copy=False).data.cast("B"))


def item_starts(
    sizes: npt.NDArray[np.int32], dtype: "np.dtype[np.integer]"
) -> npt.NDArray[np.int64]:
    """Return the byte at which each item starts in the `.bin`: the exclusive scan of the sizes."""
    starts = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=starts[1:])
    starts *= dtype.itemsize
    return starts


def index_code_of(dtype: "np.dtype[np.integer]") -> int:
    """Return the number that stands for `dtype` in the header."""
    for code, known in DTYPE_OF_CODE.items():
        if known == dtype:
            return code
    raise DataError(
        "the corpus format has no code for this token type",
        found=dtype.name,
        fix=f"use one of {', '.join(known.name for known in DTYPE_OF_CODE.values())}",
    )


def open_to_read(path: str) -> int:
    """Return a read-only descriptor of `path`, not inherited by programs that are started."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(
            f"cannot open {path}", found=f"{error.strerror}", fix="check its permissions"
        ) from error


class _Header(NamedTuple):
    dtype: np.dtype[np.integer]
    shapes: list[tuple[str, int]]  # type and length of each array that follows


def _check_header(path: str, header: bytes, stamp: Stamp) -> _Header:
    if len(header) < HEADER.size:
        raise damaged(
            path,
            "the index is shorter than its header",
            expected=f"at least {HEADER.size} bytes",
            found=f"{len(header)} bytes",
        )
    magic, version, code, num_items, len_doc_idx = HEADER.unpack(header)
    if magic != MAGIC:
        raise damaged(
            path,
            "not an index of a corpus",
            expected=f"{MAGIC!r} at its start",
            found=f"{magic!r}",
            fix="make the corpus again with tools/preprocess_data.py",
        )
    if version != VERSION:
        raise damaged(path, "an index of another version", expected=VERSION, found=version)
    dtype = dtype_of_code(path, code)
    if num_items == 0:
        raise damaged(path, "the corpus holds nothing", expected="at least one item", found=0)
    shapes = [("<i4", num_items), ("<i8", num_items), ("<i8", len_doc_idx)]
    expected = HEADER.size + 12 * num_items + 8 * len_doc_idx
    if stamp.size_bytes == expected + num_items:  # newer Megatrons store the mode of each item
        shapes.append(("<i1", num_items))
    elif stamp.size_bytes != expected:
        raise damaged(
            path,
            "the index has another length than its header says",
            expected=f"{expected} bytes ({num_items} items, {len_doc_idx} document borders)",
            found=f"{stamp.size_bytes} bytes",
        )
    return _Header(dtype, shapes)


def dtype_of_code(path: str, code: int) -> np.dtype[np.integer]:
    """Return the token type that `code` stands for in the index at `path`; raises DataError."""
    if code in DTYPE_OF_CODE:
        return DTYPE_OF_CODE[code]
    kind = " (a floating-point type, which tokens never have)" if code in _FLOAT_CODES else ""
    raise damaged(
        path,
        "the index names a type that tokens cannot have",
        expected=f"one of the integer codes {sorted(DTYPE_OF_CODE)}",
        found=f"code {code}{kind}",
    )


def _check_sizes(
    path: str,
    sizes: npt.NDArray[np.int32],
    pointers: npt.NDArray[np.int64],
    dtype: np.dtype[np.integer],
) -> None:
    negative = np.flatnonzero(sizes < 0)
    if len(negative):
        raise damaged(
            path,
            "an item has a negative size",
            expected="sizes of 0 or more",
            found=f"{sizes[negative[0]]} for item {negative[0]}",
        )
    starts = item_starts(sizes, dtype)
    wrong = np.flatnonzero(pointers != starts)
    if len(wrong):
        raise damaged(
            path,
            "an item does not start where the one before it ends",
            expected=f"item {wrong[0]} at byte {starts[wrong[0]]}",
            found=f"byte {pointers[wrong[0]]}",
        )


def _check_documents(path: str, doc_idx: npt.NDArray[np.int64], num_items: int) -> None:
    if len(doc_idx) == 0 or doc_idx[0] != 0 or doc_idx[-1] != num_items:
        raise damaged(
            path,
            "the documents do not cover the items",
            expected=f"borders from 0 to {num_items}",
            found=f"from {doc_idx[0]} to {doc_idx[-1]}" if len(doc_idx) else "no borders",
            fix="make the corpus again: the writer never closed its last document",
        )
    wrong = np.flatnonzero(doc_idx[1:] < doc_idx[:-1])
    if len(wrong):
        raise damaged(
            path,
            "a document ends before it starts",
            expected="document borders that never decrease",
            found=f"{doc_idx[wrong[0]]} then {doc_idx[wrong[0] + 1]} at document {wrong[0]}",
        )


def damaged(
    path: str,
    problem: str,
    *,
    expected: object,
    found: object,
    fix: str = "copy the file again from its source, or make the corpus again",
) -> DataError:
    """Return the error for a file that contradicts itself or its partner."""
    return DataError(f"{problem}: {path}", found=f"{found}; expected {expected}", fix=fix)


def changed(path: str, found: str) -> DataError:
    """Return the error for a file that is not what it was when it was opened."""
    return DataError(
        f"the corpus changed while it was in use: {path}",
        found=found,
        fix="leave the files alone during a run; restart from the last checkpoint with the "
        "files that it was trained on",
    )
