"""Files of layers that stay on the disk and that their checkpoint does not hold as they are needed.

They are written once and used again as long as they are of the same content: the name of a file has
a digest of the checkpoint's files, of the layer's tensors and of their precision, and a record
beside it has its length and digest, which are compared before every use. What is stale is never
found; what is damaged is written again. A file appears whole or not at all.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import xxhash
from torch import Tensor

from megatron import atomic, log
from megatron.checkpoint.files import durable, safetensors_header, safetensors_io, store
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.safetensors_header import Entry
from megatron.checkpoint.folder.manifest import FileRecord, Manifest
from megatron.errors import CheckpointError
from megatron.host import in_gib
from megatron.json_values import parse_json

_VERSION = 1
_SUFFIX = ".safetensors"


class OffloadedTensor(NamedTuple):
    """A tensor of a layer as the model holds it; `dtype_code` is its safetensors name."""

    name: str
    dtype_code: str
    shape: tuple[int, ...]


def content_digest(manifest: Manifest, directory: Path) -> str:
    """Return a digest of the content of a checkpoint.

    Of one that records digests of its files it is made of those; else all its files are read.

    Raises:
        CheckpointError: a file cannot be read.
    """
    records = {name: tuple(record) for name, record in manifest.files.items()}
    if not records:
        try:
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            records = {str(file.relative_to(directory)): store.digest_of(file) for file in files}
        except OSError as error:
            raise durable.from_os_error(error, "reading the checkpoint") from error
    return _digest([manifest.iteration, records])


class OffloadFolder:
    """The files of one checkpoint in an offload folder, which other checkpoints may share.

    Args:
        content: the digest of the checkpoint.
    """

    def __init__(self, folder: Path, content: str) -> None:
        self._folder, self._content = folder, content

    def is_recorded(self, layer: str, tensors: Sequence[OffloadedTensor]) -> bool:
        """Return whether a file of this layer has been written; reads its record alone."""
        path = self._path(layer, tensors)
        record = _record(path)
        return record is not None and path.is_file() and path.stat().st_size == record.bytes

    def find(self, layer: str, tensors: Sequence[OffloadedTensor]) -> list[TensorRange] | None:
        """Return where the tensors of a layer lie; None, with a warning if there was, without one.

        Reads the whole file and compares its digest.
        """
        path = self._path(layer, tensors)
        if not path.is_file():
            return None
        record = _record(path)
        try:
            found = FileRecord(*store.digest_of(path))
            entries = safetensors_header.read(path).entries if found == record else {}
        except (OSError, CheckpointError) as error:
            found, entries = FileRecord(-1, str(error)), {}
        ranges = _ranges(path, entries, tensors)
        if ranges is None:
            log.warning(
                f"{path} is damaged and is written again: recorded are {record}, found {found}"
            )
        return ranges

    def write(
        self, layer: str, tensors: Sequence[OffloadedTensor], values: Sequence[Tensor]
    ) -> list[TensorRange]:
        """Write the tensors of a layer, and return where they lie.

        Raises:
            CheckpointError: the system refused; what was written of the file is removed.
        """
        path = self._path(layer, tensors)
        unfinished = atomic.temporary_name(path)
        # What leaves the next one aligned first, so that all of these are; then wide elements.
        order = sorted(
            range(len(tensors)),
            key=lambda at: (
                values[at].nbytes % safetensors_header.ALIGNMENT != 0,
                -values[at].element_size(),
            ),
        )
        named = [(tensors[at].name, values[at]) for at in order]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _record_of(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # it is damaged: its room may be needed
            written = safetensors_io.write(unfinished, named)
            atomic.publish_file(unfinished, path)
            record = {"bytes": written.bytes, "xxh3": written.xxh3}
            text = json.dumps(record).encode()
            durable.replace_file(_record_of(path), text, suffix=unfinished.name)
        except OSError as error:
            with suppress(OSError):  # the first error is the one to tell
                unfinished.unlink()
            doing = f"writing {layer} into the offload folder"
            raise durable.from_os_error(error, doing) from error
        ranges = _ranges(path, safetensors_header.read(path).entries, tensors)
        assert ranges is not None, path  # noqa: S101  # invariant: they were just written
        return ranges

    def note_others(self, own: Sequence[Path]) -> None:
        """Log how much of the folder is none of the files `own`: of other checkpoints or flags."""
        files = self._folder.glob(f"*{_SUFFIX}") if self._folder.is_dir() else ()
        others = [path for path in files if path not in own]
        if others:
            size = sum(path.stat().st_size for path in others)
            log.info(
                f"{len(others)} files ({in_gib(size)}) in {self._folder} are of other checkpoints, "
                "layers or precisions; they are not used, and can be removed"
            )

    def _path(self, layer: str, tensors: Sequence[OffloadedTensor]) -> Path:
        key = _digest([_VERSION, self._content, layer, tensors])
        return self._folder / f"{layer}-{key}{_SUFFIX}"


def _ranges(
    path: Path, entries: Mapping[str, Entry], tensors: Sequence[OffloadedTensor]
) -> list[TensorRange] | None:
    """Return where tensors lie, or None if the file does not hold just these."""
    if {(n, e.dtype, e.shape) for n, e in entries.items()} != {tuple(each) for each in tensors}:
        return None
    return [
        TensorRange(path, entries[each.name].start, entries[each.name].stop, *each[1:])
        for each in tensors
    ]


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _record(path: Path) -> FileRecord | None:
    """Return the record beside a file; None if there is none that can be read."""
    try:
        fields = parse_json(_record_of(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    size, digest = fields.get("bytes"), fields.get("xxh3")
    return FileRecord(size, digest) if type(size) is int and isinstance(digest, str) else None


def _digest(values: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
