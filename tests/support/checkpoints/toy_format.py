"""A format for tests only: one safetensors file, with other values in its header.

CONTRIBUTING.md shows its record as the example of how to add a format, and a test holds that the
example is what stands here.
"""

import json
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.files import safetensors_io
from megatron.checkpoint.folder.run_folder import TRACKER, iteration_name
from megatron.checkpoint.formats.format import Format
from megatron.checkpoint.source import (
    CheckpointSource,
    SourceBase,
    SourceOptions,
    TensorDescription,
    WriteOptions,
)

FILE = "toy.safetensors"


class ToySource(SourceBase):
    format_name = "toy"

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        self._reader = safetensors_io.Reader(directory / FILE)
        header = self._reader.header
        facts = json.loads(header.metadata["facts"])
        self.config, self.progress, self.scalars = facts
        order = json.loads(header.metadata["order"])
        self.tensors = {
            name: TensorDescription(header.entries[name].dtype, header.entries[name].shape)
            for name in order
        }

    def read(self, name: str, box: Box) -> Tensor:
        return self._reader.tensor(name)[box.slices].clone()

    def close(self) -> None:
        self._reader.close()


def write_toy(source: CheckpointSource, save: Path, options: WriteOptions) -> Path:
    iteration = options.iteration_of(source)
    directory = save / iteration_name(iteration)
    directory.mkdir(parents=True)
    tensors = [
        (name, source.read(name, whole(known.global_shape)))
        for name, known in source.tensors.items()
    ]
    facts = [dict(source.config), dict(source.progress), dict(source.scalars)]
    metadata = {"facts": json.dumps(facts), "order": json.dumps(list(source.tensors))}
    safetensors_io.write(directory / FILE, tensors, metadata=metadata)
    (save / TRACKER).write_text(f"{iteration}\n")
    return directory


def is_toy(directory: Path) -> bool:
    return (directory / FILE).is_file()


TOY = Format(
    name=ToySource.format_name,
    recognise=is_toy,
    open_source=ToySource,
    write=write_toy,
)
