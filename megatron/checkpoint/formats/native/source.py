"""Our own format as a source, and any source written as a checkpoint of our own.

Both are for one process without groups: offline tools, and runs that load what another tool wrote.
Writing goes through the same stage, digests, manifest, rename and tracker as a save of a run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import megatron
from megatron import log
from megatron.checkpoint import reshard
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.files import durable, safetensors_io
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES, tensor_bytes
from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import (
    FileRecord,
    GridLayout,
    Manifest,
    SavedPiece,
    SavedTensor,
    entry_name,
)
from megatron.checkpoint.formats.native.sharded import NAME
from megatron.checkpoint.load.source_config import completed_config, completed_progress
from megatron.checkpoint.source import (
    CheckpointSource,
    SourceBase,
    TensorDescription,
    WriteOptions,
)
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject

SHARD_BYTES = 4 << 30  # of tensors in one file; a larger tensor has a file of its own
_ROOM_BYTES = 1 << 20  # for the manifest's fixed part and the file system's own blocks
_TENSOR_BYTES = 512  # of headers and manifest for one part of a tensor, beside its name


class ShardedSource(SourceBase):
    """A checkpoint of our own format, of any layout."""

    format_name = NAME

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest, _ = manifest.load(directory)
        damages = verify.wrong_sizes(directory, self.manifest, self.manifest.files)
        if damages:
            raise verify.damage_error(directory, damages)
        self._readers: dict[str, safetensors_io.Reader] = {}

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Dtype and whole shape of every tensor, as the manifest lists them."""
        return {
            name: TensorDescription(tensor.dtype_code, tensor.global_shape)
            for name, tensor in self.manifest.tensors.items()
        }

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """Every flag of the run that saved it."""
        return self.manifest.config

    @property
    def kind(self) -> str:
        """The kind of model that the run trained."""
        return self.manifest.kind

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of that run."""
        return self.manifest.progress

    @property
    def scalars(self) -> JsonObject:
        """The state of its engine beside tensors."""
        return self.manifest.scalars

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`, assembled from the pieces that hold them."""
        saved = self.manifest.tensors[name]
        result = torch.empty(box.shape, dtype=safetensors_io.dtype_of(saved.dtype_code))
        for copy in reshard.plan(name, saved.boxes, [box]):
            piece = saved.pieces[copy.saved]
            entry = manifest.entry_name(name, piece.box, saved.global_shape)
            reader = self._reader(piece.file)
            if entry not in reader.header.entries:
                raise CheckpointError(
                    "a checkpoint file does not hold what the manifest says",
                    found=f"{reader.path}: no {entry}",
                    fix="the checkpoint is damaged: load an older iteration",
                )
            target = result[copy.box.within(box).slices]
            reader.read_into(entry, copy.box.within(piece.box), target)
        return result

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Compare the digests of part `share` of `of` parts of the files."""
        files = list(self.manifest.files)[share::of]
        if damages := verify.wrong_digests(self.directory, self.manifest, files):
            raise verify.damage_error(self.directory, damages)

    def close(self) -> None:
        """Close the files that reads have opened."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, file: str) -> safetensors_io.Reader:
        if file not in self._readers:
            self._readers[file] = safetensors_io.Reader(self.directory / file)
        return self._readers[file]


def write_sharded(
    source: CheckpointSource,
    save: Path,
    options: WriteOptions | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `source` as a checkpoint of our own format into the folder `save`, as the latest one.

    Reads one tensor at a time, and of a stack of experts one of them. Returns the checkpoint's
    folder. One process works on `save`.

    Raises:
        CheckpointError: there is no room, the iteration exists, or the source is damaged or does
            not record its model's shape; `save` is unchanged.
    """
    options = options or WriteOptions()
    iteration = options.iteration_of(source)
    described = {
        name: description
        for name, description in source.tensors.items()
        if options.optimizer or name.startswith("model/")
    }
    config = completed_config(source)
    progress = completed_progress(source, iteration)
    scalars = dict(source.scalars) if options.optimizer else {}
    needed = sum(
        tensor_bytes(*description)
        + len(_boxes(description.global_shape)) * (2 * len(name) + _TENSOR_BYTES)
        for name, description in described.items()
    )
    stage = None
    try:
        folders.begin(save)
        folders.refuse_existing(save, iteration)
        folders.require_space(save, needed + _ROOM_BYTES)
        stage = folders.make_stage(save, iteration)
        files, tensors = _write_files(source, stage, described, shard_bytes)
        content = Manifest(
            iteration=iteration,
            layout=GridLayout(tp=1, pp=1, dp=1),
            progress=progress,
            scalars=scalars,
            config=config,
            tensors=tensors,
            files=files,
            generators=(),
            written_by={
                "megatron": megatron.__version__,
                "torch": torch.__version__,
                "converted from": source.format_name,
            },
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model_kind=source.kind,
        )
        text = manifest.encode(content)
        manifest.decode(text, stage / manifest.NAME)
        durable.write_file(stage / manifest.NAME, text)
        final = folders.commit(stage, iteration)
        stage = None
    except OSError as error:
        raise durable.from_os_error(error, "writing the checkpoint") from error
    finally:
        if stage is not None and stage.exists():
            folders.remove(stage)
    log.info(f"wrote {final}: {len(tensors)} tensors, {content.bytes:,} bytes")
    return final


def _write_files(
    source: CheckpointSource,
    stage: Path,
    described: Mapping[str, TensorDescription],
    shard_bytes: int,
) -> tuple[dict[str, FileRecord], dict[str, SavedTensor]]:
    files: dict[str, FileRecord] = {}
    pieces: dict[str, list[SavedPiece]] = defaultdict(list)
    groups = list(_groups(described, shard_bytes))
    for at, names in enumerate(groups):
        file = f"shard-{at:05d}-of-{len(groups):05d}.safetensors"
        parts = [(name, box) for name in names for box in _boxes(described[name].global_shape)]
        written = safetensors_io.write_stream(
            stage / file,
            [
                (entry_name(name, box, shape), code, box.shape)
                for name, box in parts
                for code, shape in (described[name],)
            ],
            (source.read(name, box) for name, box in parts),
        )
        files[file] = FileRecord(written.bytes, written.xxh3)
        for (name, box), digest in zip(parts, written.tensors_xxh3):
            pieces[name].append(SavedPiece(file, box, digest))
    tensors = {
        name: SavedTensor(description.dtype_code, description.global_shape, tuple(pieces[name]))
        for name, description in described.items()
    }
    return files, tensors


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes to read and write one at a time: each matrix of a stack, or the whole."""
    if len(shape) < 3:
        return [whole(shape)]
    return [Box((at, *(0 for _ in shape[1:])), (1, *shape[1:])) for at in range(shape[0])]


def _groups(described: Mapping[str, TensorDescription], shard_bytes: int) -> Iterator[list[str]]:
    """Yield names for one file each; in it larger element types first, so that all lie aligned."""
    names: list[str] = []
    total = 0
    for name, description in described.items():
        size = tensor_bytes(*description)
        if names and total + size > shard_bytes:
            yield _aligned(names, described)
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield _aligned(names, described)


def _aligned(names: Sequence[str], described: Mapping[str, TensorDescription]) -> list[str]:
    return sorted(names, key=lambda name: -ITEM_BYTES[described[name].dtype_code])
