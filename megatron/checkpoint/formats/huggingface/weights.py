"""The weight files of a Hugging Face folder as one set of tensors by their own names.

`model.safetensors`, shards with an index, or the same in the older torch.save form. This module is
independent of families. A header must account for every byte of its file, and an index must agree
with the files.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_index, unpickle
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.safetensors_io import Reader, dtype_code_of
from megatron.checkpoint.source import TensorDescription
from megatron.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = safetensors_index.NAME
OLD_SINGLE = "pytorch_model.bin"
OLD_INDEX = "pytorch_model.bin.index.json"
NAMES = (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX)


class Weights(Protocol):
    """Tensors by their names in the files."""

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Element type and shape of each, without reading any."""

    def read_into(self, key: str, box: Box, target: Tensor) -> None:
        """Copy `box` of the tensor `key` into `target`, which has the box's shape."""

    def range_of(self, key: str) -> TensorRange | None:
        """Return where the tensor `key` lies as plain bytes; None if nowhere."""

    def close(self) -> None:
        """Close the files."""


def open_weights(directory: Path) -> Weights:
    """Return the weights in `directory`, in any of the four forms; safetensors come first.

    Raises:
        CheckpointError: there are none, or files and index do not agree.
    """
    if (directory / SINGLE).is_file():
        return _Safetensors(directory, {SINGLE: None})
    if (directory / INDEX).is_file():
        return _Safetensors(directory, _by_file(safetensors_index.read(directory / INDEX)))
    if (directory / OLD_SINGLE).is_file():
        return _Pickled(directory, {OLD_SINGLE: None})
    if (directory / OLD_INDEX).is_file():
        index = safetensors_index.read(directory / OLD_INDEX, ".bin")
        return _Pickled(directory, _by_file(index))
    raise CheckpointError(
        "a Hugging Face folder has no weights in it",
        found=f"{directory} without {', '.join(NAMES)}",
        fix="copy the folder whole; of a model in the cache of huggingface_hub that is a snapshot",
    )


class _Safetensors:
    """Readers of all safetensors files; their headers have been compared with the index."""

    def __init__(self, directory: Path, files: Mapping[str, set[str] | None]) -> None:
        self._readers: list[Reader] = []
        self._holder: dict[str, Reader] = {}
        self.tensors: dict[str, TensorDescription] = {}
        try:
            for file, expected in files.items():
                reader = Reader(directory / file)
                self._readers.append(reader)
                entries = reader.header.entries
                _compare(directory / file, entries.keys(), expected, self._holder)
                for key, entry in entries.items():
                    self._holder[key] = reader
                    self.tensors[key] = TensorDescription(entry.dtype, entry.shape)
        except BaseException:
            self.close()
            raise

    def read_into(self, key: str, box: Box, target: Tensor) -> None:
        self._holder[key].read_into(key, box, target)

    def range_of(self, key: str) -> TensorRange | None:
        path, entry = self._holder[key].path, self._holder[key].header.entries[key]
        assert isinstance(path, Path)  # noqa: S101  # invariant: opened below a folder
        return TensorRange(path, entry.start, entry.stop, entry.dtype, entry.shape)

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()


class _Pickled:
    """Files of torch.save, mapped into memory: pages are read on demand."""

    def __init__(self, directory: Path, files: Mapping[str, set[str] | None]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self.tensors: dict[str, TensorDescription] = {}
        for file, expected in files.items():
            loaded = unpickle.load(directory / file)
            if not isinstance(loaded, Mapping) or not all(
                isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()
            ):
                raise CheckpointError(
                    "a file of weights holds something else than tensors by name",
                    found=str(directory / file),
                    fix="save the model anew with transformers: model.save_pretrained(FOLDER)",
                )
            _compare(directory / file, loaded.keys(), expected, self._tensors)
            self._tensors.update(loaded)
        for key, tensor in self._tensors.items():
            self.tensors[key] = TensorDescription(dtype_code_of(tensor.dtype), tuple(tensor.shape))

    def read_into(self, key: str, box: Box, target: Tensor) -> None:
        target.copy_(self._tensors[key][box.slices])

    def range_of(self, key: str) -> TensorRange | None:
        return None  # an archive, whose parts may be compressed

    def close(self) -> None:
        self._tensors = {}


def _by_file(index: Mapping[str, str]) -> dict[str, set[str] | None]:
    files: defaultdict[str, set[str] | None] = defaultdict(set)
    for key, file in index.items():
        keys = files[file]
        assert keys is not None  # noqa: S101  # invariant: the default is a set
        keys.add(key)
    return dict(files)


def _compare(path: Path, keys: Set[str], expected: set[str] | None, known: Iterable[str]) -> None:
    """Raise CheckpointError if files and index differ, or a tensor is stored twice."""
    if twice := sorted(keys & set(known)):
        raise _disagree(path, f"{twice[0]!r}, which another file has too")
    if expected is None:
        return
    if lacking := sorted(expected - keys):
        raise _disagree(path, f"no {lacking[0]!r}, which the index lists")
    if extra := sorted(keys - expected):
        raise _disagree(path, f"{extra[0]!r}, which the index does not list")


def _disagree(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "the shards of a Hugging Face folder and their index do not agree",
        found=f"{path}: {found}",
        fix="copy the folder whole, from one release",
    )
