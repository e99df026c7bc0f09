"""Indices of either kind: the mmap format, or the older one of Megatron's lazy and cached corpora.

The older format (`TNTIDX`) counts offsets in tokens and allows items of several dimensions. What a
reader would get wrong: its `.bin` is the same as that of the mmap format, so once its index is an
`Index`, everything else is shared. It is read and never written.
"""

import os
import struct

import numpy as np
import numpy.typing as npt

from megatron.data.corpus.index_file import (
    Index,
    Stamp,
    check_index_arrays,
    damaged,
    dtype_of_code,
    open_to_read,
    read_index,
)
from megatron.errors import DataError

LEGACY_MAGIC = b"TNTIDX\x00\x00"
LEGACY_VERSION = 1
# magic, version, type code, bytes in a token, number of items, number of sizes, len(doc_idx)
LEGACY_HEADER = struct.Struct("<8sQQQQQQ")
_MOST_SIZE = np.iinfo(np.int32).max


def read_any_index(path: str) -> Index:
    """Read and check the index at `path`, of either format; raises DataError."""
    with os.fdopen(open_to_read(path), "rb") as file:
        if file.read(len(LEGACY_MAGIC)) != LEGACY_MAGIC:
            return read_index(path)
        stamp = Stamp.of(os.fstat(file.fileno()))
        file.seek(0)
        dtype, num_items, len_doc_idx = _check_header(path, file.read(LEGACY_HEADER.size), stamp)
        lengths = (num_items + 1, num_items + 1, num_items, len_doc_idx)
        dimensions, offsets, sizes, doc_idx = (np.fromfile(file, "<i8", n) for n in lengths)
    _check_dimensions(path, dimensions)
    _check_size_range(path, sizes)
    _check_end(path, offsets, sizes)
    index = Index(dtype, sizes.astype(np.int32), offsets[:-1] * dtype.itemsize, doc_idx, stamp)
    check_index_arrays(path, index)
    return index


def _check_header(path: str, header: bytes, stamp: Stamp) -> tuple[np.dtype[np.integer], int, int]:
    if len(header) < LEGACY_HEADER.size:
        raise damaged(
            path,
            "the index is shorter than its header",
            expected=f"at least {LEGACY_HEADER.size} bytes",
            found=f"{len(header)} bytes",
        )
    _, version, code, token_bytes, num_items, num_sizes, len_doc_idx = LEGACY_HEADER.unpack(header)
    if version != LEGACY_VERSION:
        raise damaged(path, "an index of another version", expected=LEGACY_VERSION, found=version)
    dtype = dtype_of_code(path, code)
    if token_bytes != dtype.itemsize:
        raise damaged(
            path,
            "the index contradicts itself about the width of a token",
            expected=f"{dtype.itemsize} bytes for {dtype.name}",
            found=token_bytes,
        )
    if num_items == 0:
        raise damaged(path, "the corpus holds nothing", expected="at least one item", found=0)
    if num_sizes != num_items:
        raise _not_flat(path, f"{num_sizes} sizes for {num_items} items")
    expected = LEGACY_HEADER.size + 8 * (3 * num_items + 2 + len_doc_idx)
    if stamp.size_bytes != expected:
        raise damaged(
            path,
            "the index has another length than its header says",
            expected=f"{expected} bytes ({num_items} items, {len_doc_idx} document borders)",
            found=f"{stamp.size_bytes} bytes",
        )
    return dtype, num_items, len_doc_idx


def _check_dimensions(path: str, dimensions: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(dimensions != np.arange(len(dimensions)))
    if len(wrong):
        raise _not_flat(path, f"dimension border {dimensions[wrong[0]]} at item {wrong[0]}")


def _check_size_range(path: str, sizes: npt.NDArray[np.int64]) -> None:
    wrong = np.flatnonzero((sizes < 0) | (sizes > _MOST_SIZE))
    if len(wrong):
        raise damaged(
            path,
            "an item has a size that no item can have",
            expected=f"0 to {_MOST_SIZE}",
            found=f"{sizes[wrong[0]]} for item {wrong[0]}",
        )


def _check_end(
    path: str,
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> None:
    total = int(sizes.sum())
    if int(offsets[-1]) != total:
        raise damaged(
            path,
            "the last item does not end where the sizes say",
            expected=f"token {total}",
            found=f"token {offsets[-1]}",
        )


def _not_flat(path: str, found: str) -> DataError:
    return damaged(
        path,
        "an item is not a flat sequence of tokens",
        expected="one size for each item",
        found=found,
        fix="make the corpus again from its text with tools/preprocess_data.py",
    )
