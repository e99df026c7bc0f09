"""An index of blocks on the disk: a folder with a file of ids and vectors of each rank, and a list.

The list names the checkpoint and the evidence by digests of their content, and every file with its
digest; it is written last, by rank 0, so a folder without it is no index. Nothing is a pickle.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron import atomic
from megatron.checkpoint.files import safetensors_io, store
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.json_values import parse_json
from tools.preprocessing.text_output import write_text_files

LIST = "index.json"
_VERSION = 1
_IDS, _VECTORS = "ids", "vectors"


@dataclass(frozen=True, slots=True)
class IndexKey:
    """What an index is made of.

    Attributes:
        checkpoint: a digest of the content of the retriever's checkpoint.
        evidence: a digest of the blocks and of how their rows are made.
    """

    checkpoint: str
    evidence: str


class PartRecord(NamedTuple):
    """A file of an index."""

    name: str
    blocks: int
    width: int
    bytes: int
    xxh3: str


def write_part(folder: Path, rank: int, ranks: int, ids: Tensor, vectors: Tensor) -> PartRecord:
    """Write the blocks of one rank durably; the file appears whole.

    Args:
        ids: int64 [n].
        vectors: fp32 [n, e].

    Raises:
        MachineError: it cannot be written.
    """
    final = folder / f"part-{rank:05d}-of-{ranks:05d}.safetensors"
    temporary = atomic.temporary_name(final)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise atomic.write_error(final, error) from error
    try:
        written = safetensors_io.write(temporary, [(_IDS, ids), (_VECTORS, vectors)])
        atomic.publish_file(temporary, final)
    except OSError as error:
        raise atomic.write_error(final, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return PartRecord(final.name, len(ids), vectors.shape[1], written.bytes, written.xxh3)


def write_list(folder: Path, key: IndexKey, parts: Sequence[PartRecord]) -> None:
    """Write the list of the files of all ranks, after which the folder is an index."""
    content = {
        "version": _VERSION,
        "key": asdict(key),
        "parts": [part._asdict() for part in parts],
    }
    write_text_files({folder / LIST: json.dumps(content, indent=1) + "\n"})


def has_index(folder: Path, key: IndexKey) -> bool:
    """Return whether the folder holds the index of `key`; False where there is none.

    Raises:
        DataError: it holds another one, or a damaged list.
    """
    if not (folder / LIST).exists():
        return False
    found, _ = _read_list(folder)
    if found != key:
        raise _another(folder, found, key, "remove the folder, or name another one")
    return True


class BlockIndex:
    """An index that was written, whose files are whole.

    Raises:
        ConfigError: there is no index in the folder.
        DataError: it is of another checkpoint or of other blocks, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, key: IndexKey) -> None:
        if not (folder / LIST).exists():
            raise ConfigError(
                "there is no index of blocks",
                found=f"--embedding-path {folder}, without {LIST}",
                fix="make it with tools/create_doc_index.py",
            )
        found, self._parts = _read_list(folder)
        if found != key:
            raise _another(folder, found, key, "make the index again, in another folder")
        self._folder = folder
        for part in self._parts:
            self._check(part)
        self.ids = torch.cat([self._tensor(part, _IDS) for part in self._parts])

    def __len__(self) -> int:
        return sum(part.blocks for part in self._parts)

    def vectors(self) -> Iterator[Tensor]:
        """Yield the vectors of each file in order, fp32 [n, e]; one is in memory at a time."""
        for part in self._parts:
            if part.blocks:
                yield self._tensor(part, _VECTORS)

    def _tensor(self, part: PartRecord, name: str) -> Tensor:
        with safetensors_io.Reader(self._folder / part.name) as reader:
            return reader.tensor(name)

    def _check(self, part: PartRecord) -> None:
        path = self._folder / part.name
        try:
            found = store.digest_of(path)
        except OSError as error:
            raise DataError(
                "a file of an index of blocks cannot be read",
                found=f"{path}: {error.strerror or error}",
                fix="make the index again with tools/create_doc_index.py, in another folder",
            ) from error
        if found != (part.bytes, part.xxh3):
            raise DataError(
                "a file of an index of blocks is damaged",
                found=f"{path}: {found[0]} bytes of digest {found[1]}, expected {part.bytes} of "
                f"{part.xxh3}",
                fix="make the index again with tools/create_doc_index.py, in another folder",
            )


def _read_list(folder: Path) -> tuple[IndexKey, list[PartRecord]]:
    path = folder / LIST
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}")
        parts = [PartRecord(**part) for part in content["parts"]]
        return IndexKey(**content["key"]), parts
    except (ValueError, KeyError, TypeError, MegatronError) as error:
        raise DataError(
            "the list of an index of blocks is damaged",
            found=f"{path}: {error}",
            fix="make the index again with tools/create_doc_index.py, in another folder",
        ) from error


def _another(folder: Path, found: IndexKey, wanted: IndexKey, fix: str) -> DataError:
    differing = [
        f"{name} {one}, wanted {other}"
        for (name, one), other in zip(asdict(found).items(), asdict(wanted).values())
        if one != other
    ]
    return DataError(
        "the index of blocks is of another checkpoint or of other blocks",
        found=f"{folder}: {'; '.join(differing)}",
        fix=fix,
    )
