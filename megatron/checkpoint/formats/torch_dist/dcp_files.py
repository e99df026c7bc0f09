"""Writes tensors and objects as torch.distributed.checkpoint does, durably and one at a time.

torch's writer makes the files and their index, so that its reader and Megatron's load them. What a
reader would get wrong: the state that is planned has no elements; a tensor is read from its source
when its turn comes, and is gone before the next one is read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.checkpoint.files.durable import DurableFile
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.files.torch_file import WriteStream, stream_of
from megatron.checkpoint.source import TensorDescription


def write(
    directory: Path,
    tensors: Mapping[str, TensorDescription],
    objects: Mapping[str, Any],
    read: Callable[[str], Tensor],
) -> None:
    """Write one file with all tensors and objects, and its index, into an existing folder.

    Args:
        tensors: what is written, by key; `read` returns the elements of a key.

    Raises:
        OSError: a file could not be written; it names the file.
    """
    state: dict[str, Any] = {
        key: torch.empty(known.global_shape, dtype=dtype_of(known.dtype_code), device="meta")
        for key, known in tensors.items()
    }
    # An object is one element of a list, by which readers tell it from a tensor.
    state |= {key: [value] for key, value in objects.items()}
    planner = _ReadingPlanner(read)
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=False)
    writer.fs = _DurableFileSystem()
    planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


class _ReadingPlanner(DefaultSavePlanner):
    """A plan of tensors without elements, which are read when they are written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object, or the elements of the tensor, for a key."""
        value = super().lookup_object(index)
        return self._read(index.fqn) if isinstance(value, Tensor) else value


class _DurableFileSystem(FileSystem):
    """torch's access to files, with every new file on the disk before it counts."""

    @contextmanager
    def create_stream(  # type: ignore[override]  # torch calls no more than a WriteStream has
        self, path: Any, mode: str
    ) -> Iterator[WriteStream]:
        """Return a stream to a new file, durable at the end of the block."""
        with DurableFile(Path(path)) as file, stream_of(file) as stream:
            yield stream
