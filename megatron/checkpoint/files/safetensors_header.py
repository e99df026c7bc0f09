"""The header of a safetensors file: where each tensor's bytes lie, written and read strictly.

Format: 8 bytes little-endian header length, a JSON object, the data
(https://github.com/huggingface/safetensors#format). No torch here. A header is trusted only after
it accounts for every byte of its file.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.checkpoint.files.store import Place
from megatron.errors import CheckpointError
from megatron.json_values import parse_json

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
# Bytes, at whose multiples tensors in PyTorch's memory begin, and the first one of our files.
ALIGNMENT = 64


class Entry(NamedTuple):
    """One tensor of a file: its type, shape, and bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The metadata and the entries of one file."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes; KeyError for an unknown dtype."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def encode(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return length and JSON of a header for `(name, dtype, shape)`, in the order of the data.

    Larger element types must come first, or tensors would lie at odd addresses.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + tensor_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read(path: Place) -> Header:
    """Return the header of the file at `path`.

    Raises:
        CheckpointError: it is not JSON of the format, or does not account for every byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _bad(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        fields = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"a header that is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _bad(path, "a header that is not an object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "__metadata__ that is not text by name")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in fields.items()}
    _check_order(path, entries, 8 + length, size)
    return Header(entries, metadata)


def _entry(path: Place, name: str, value: Any, origin: int) -> Entry:
    try:
        dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
        good = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        good = good and stop - start == tensor_bytes(dtype, shape)
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise _bad(path, f"tensor {name!r} described as {str(value)[:200]}")
    return Entry(dtype, tuple(shape), origin + start, origin + stop)


def _check_order(path: Place, entries: Mapping[str, Entry], origin: int, size: int) -> None:
    at = origin
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != at:
            raise _bad(path, f"tensor {name!r} at byte {entry.start} where {at} was due")
        at = entry.stop
    if at != size:
        raise _bad(path, f"tensors up to byte {at} in a file of {size}")


def _bad(path: Place, found: str) -> CheckpointError:
    return CheckpointError(
        "a safetensors file has a header that cannot be right",
        found=f"{path}: {re.sub('[^ -~]', '?', found)}",
        fix="the file is damaged: load an older iteration, or copy it again",
    )
