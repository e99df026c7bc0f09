"""The index of a folder that torch.distributed.checkpoint wrote: which bytes hold which elements.

`.metadata` is a pickle of torch's classes; stand-ins are built for them, and nothing of torch's own
reader runs. Every entry is checked against the files here, so that readers find what it promises.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, overlap, tiling_fault
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.file_window import FileWindow
from megatron.checkpoint.files.safetensors_io import dtype_code_of
from megatron.checkpoint.files.unpickle import Inert, TensorRecord
from megatron.errors import CheckpointError

METADATA = ".metadata"
COPY_WHOLE = "copy the checkpoint whole, from one save"


class Item(NamedTuple):
    """One torch.save archive: a range of bytes of a file."""

    file: str
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """One box of a tensor, and the archive that holds its elements."""

    box: Box
    item: Item


class StoredTensor(NamedTuple):
    """A whole tensor, as its chunks hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class _Record(Inert):
    """A stand-in for an object of torch's: its fields are attributes."""


class _Properties(_Record):
    """A stand-in for the properties of a tensor, whose state is a tuple."""

    dtype: torch.dtype | None = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__({"dtype": state[0]} if isinstance(state, tuple) else state)


class _Address(_Record):
    """A stand-in for a key with an offset, which objects do not have."""

    offset: tuple[int, ...] | None = None


class _TensorEntry(_Record):
    """A stand-in for the description of a tensor."""


class _ObjectEntry(_Record):
    """A stand-in for the description of an object that is no tensor."""


_CLASSES: Mapping[str, Mapping[str, type[_Record]]] = {
    "torch.distributed.checkpoint.metadata": {
        "TensorStorageMetadata": _TensorEntry,
        "BytesStorageMetadata": _ObjectEntry,
        "TensorProperties": _Properties,
        "MetadataIndex": _Address,
        **dict.fromkeys(("Metadata", "ChunkStorageMetadata", "StorageMeta"), _Record),
        "_MEM_FORMAT_ENCODING": _Record,
    },
    "torch.distributed._shard.sharded_tensor.metadata": {
        "TensorProperties": _Properties,
        "MEM_FORMAT_ENCODING": _Record,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _Record},
    "torch.distributed.checkpoint.planner": dict.fromkeys(
        ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"), _Record
    ),
    "megatron.core.dist_checkpointing.strategies.torch": dict.fromkeys(
        ("MCoreSavePlan", "MCoreMetadata"), _Record
    ),
    "torch.serialization": {"_get_layout": _Record},
}
_DTYPES = tuple(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_ALLOWED: Mapping[str, Any] = {
    **{f"{module}.{name}": kind for module, kinds in _CLASSES.items()
       for name, kind in kinds.items()},
    **{str(dtype): dtype for dtype in _DTYPES},
    "torch.Size": tuple,
    **unpickle.PATHS,
}  # fmt: skip


class StoredIndex:
    """All tensors and objects of one folder, by key.

    Raises:
        CheckpointError: the index is missing, damaged, or does not match the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Item] = {}
        self._records: dict[Item, TensorRecord] = {}
        self._sizes: dict[str, int] = {}
        content = unpickle.load_pickle(directory / METADATA, _ALLOWED)
        try:
            self._collect(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"{METADATA}: {type(error).__name__}: {error}") from error

    @property
    def items(self) -> Iterator[Item]:
        """All archives, those of tensors first."""
        for stored in self.tensors.values():
            yield from (chunk.item for chunk in stored.chunks)
        yield from self.objects.values()

    def read_object(self, key: str) -> Any:
        """Return the object under `key`, in plain values.

        Raises:
            CheckpointError: the archive is damaged, or names what is not allowed.
        """
        with self.window(self.objects[key]) as window:
            content = unpickle.load_window(window)
        # Saved as one element of a list, so that any object can be told from a tensor.
        return content[0] if isinstance(content, list) and len(content) == 1 else content

    def read(self, key: str, box: Box) -> Tensor:
        """Return the elements `box` of the tensor `key`; reads no more of a chunk than their span.

        Raises:
            CheckpointError: an archive is damaged, or does not hold what the index promises.
        """
        stored = self.tensors[key]
        result = torch.empty(box.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            common = overlap(chunk.box, box)
            if common is not None:
                result[common.within(box).slices] = self._elements(key, chunk, common)
        return result

    def window(self, item: Item) -> FileWindow:
        """Return the bytes of one archive, opened."""
        return FileWindow(self.directory / item.file, item.offset, item.length)

    def _elements(self, key: str, chunk: StoredChunk, box: Box) -> Tensor:
        with self.window(chunk.item) as window:
            record = self._records.get(chunk.item)
            if record is None:
                record = self._records[chunk.item] = unpickle.tensor_record(window)
            stored = self.tensors[key]
            if (record.dtype, record.shape) != (stored.dtype, chunk.box.shape):
                raise self._error(
                    f"{key} in {window} is {record.dtype} {list(record.shape)}, where "
                    f"{METADATA} promises {stored.dtype} {list(chunk.box.shape)}"
                )
            inside = box.within(chunk.box)
            first = sum(at * step for at, step in zip(inside.offset, record.strides))
            span = 1 + sum((n - 1) * step for n, step in zip(inside.shape, record.strides))
            width = stored.dtype.itemsize
            window.seek(record.start + first * width)
            data = bytearray(span * width)
            if window.readinto(data) != len(data):
                raise self._error(f"{window} ends within the elements of {key}")
        flat = torch.frombuffer(data, dtype=stored.dtype)
        return flat.as_strided(inside.shape, record.strides)

    def _collect(self, content: Any) -> None:
        items: dict[tuple[str, tuple[int, ...] | None], Item] = {}
        for index, info in content.storage_data.items():
            offset = None if index.offset is None else tuple(index.offset)
            items[index.fqn, offset] = self._item(info)
        for key, entry in content.state_dict_metadata.items():
            if isinstance(entry, _ObjectEntry):
                if (key, None) not in items:
                    raise self._error(f"{METADATA} says of no file that it holds {key}")
                self.objects[key] = items[key, None]
            elif isinstance(entry, _TensorEntry):
                self.tensors[key] = self._tensor(key, entry, items)
            else:
                raise TypeError(f"{key} is neither a tensor nor an object")

    def _tensor(
        self, key: str, entry: Any, items: Mapping[tuple[str, tuple[int, ...] | None], Item]
    ) -> StoredTensor:
        dtype, shape = entry.properties.dtype, tuple(entry.size)
        dtype_code_of(dtype)  # refuses one that no checkpoint of ours has
        chunks = []
        for part in entry.chunks:
            box = Box(tuple(part.offsets), tuple(part.sizes))
            if (key, box.offset) not in items:
                raise self._error(
                    f"{METADATA} says of no file that it holds {key} from {list(box.offset)} on"
                )
            chunks.append(StoredChunk(box, items[key, box.offset]))
        fault = tiling_fault([chunk.box for chunk in chunks], shape)
        if fault is not None:
            raise self._error(f"chunks of {key} in {METADATA}: {fault}")
        return StoredTensor(dtype, shape, tuple(chunks))

    def _item(self, info: Any) -> Item:
        item = Item(str(info.relative_path), int(info.offset), int(info.length))
        if "/" in item.file or item.file.startswith("."):
            raise self._error(f"{METADATA} names the file {item.file!r}, outside of the folder")
        if getattr(info, "transform_descriptors", None):
            raise self._error(
                f"{item.file} is transformed by {info.transform_descriptors}, which is not undone",
                fix="save it without extensions of torch.distributed.checkpoint",
            )
        if item.file not in self._sizes:
            path = self.directory / item.file
            if not path.is_file():
                raise self._error(f"{METADATA} names {item.file}, which is not there")
            self._sizes[item.file] = path.stat().st_size
        if item.offset < 0 or item.offset + item.length > self._sizes[item.file]:
            raise self._error(
                f"{item.file} has {self._sizes[item.file]:,} bytes, and {METADATA} names bytes up "
                f"to {item.offset + item.length:,}"
            )
        return item

    def _error(self, found: str, fix: str = COPY_WHOLE) -> CheckpointError:
        return CheckpointError(
            "a torch_dist checkpoint does not hold what its index says",
            found=f"{self.directory}: {found}",
            fix=fix,
        )
