"""Folders in Megatron core's `torch_dist` layout, made from a description of the layout alone.

`keys_of` renames and stacks a model of `megatron_files`; `save_chunks` writes tensors in any chunks
with torch's classes of metadata, as several ranks of Megatron would.
"""

import argparse
import io
import itertools
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from tests.support.checkpoints.megatron_files import Shape, core_name, flags

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and shape of each chunk
Cut = Callable[[str, Tensor], Boxes]
LINEARS = (
    *("self_attention.linear_qkv", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
# What tensor-parallel ranks split by rows, a gated fc1 apart.
_BY_ROWS = (
    *(f"linear_{name}.{leaf}" for name in ("qkv", "q", "kv") for leaf in ("weight", "bias")),
    "word_embeddings.weight",
)


def keys_of(model: Mapping[str, Tensor], shape: Shape, prefix: str = "") -> dict[str, Tensor]:
    """Whole tensors by model key, equal layers stacked along a new first axis."""
    trunk = "encoder" if shape.bert else "decoder"
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in model.items():
        key = re.sub(r"^encoder\.", f"{trunk}.", core_name(name))
        stacked.setdefault(prefix + re.sub(r"\.layers\.\d+\.", ".layers.", key), []).append(tensor)
    return {
        key: torch.stack(parts) if ".layers." in key else parts[0] for key, parts in stacked.items()
    }


def whole(key: str, tensor: Tensor) -> Boxes:
    """One chunk, as a plain save makes it."""
    return [((0,) * tensor.dim(), tuple(tensor.shape))]


def by_rank(key: str, tensor: Tensor) -> Boxes:
    """A chunk for each layer, and within it for two tensor ranks; a gated fc1 has two for each."""
    counts = [1] * tensor.dim()
    at = 0
    if ".layers." in key:
        counts[0], at = len(tensor), 1
    if key.endswith(_BY_ROWS):
        counts[at] = 2
    if key.endswith(("linear_fc1.weight", "linear_fc1.bias")):
        counts[at] = 4
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        counts[at + 1] = 2
    cell = [size // count for size, count in zip(tensor.shape, counts)]
    return [
        (tuple(i * n for i, n in zip(place, cell)), tuple(cell))
        for place in itertools.product(*map(range, counts))
    ]


def save_chunks(
    directory: Path,
    tensors: Mapping[str, Tensor],
    objects: Mapping[str, Any],
    *,
    cut: Cut = by_rank,
    files: int = 3,
) -> None:
    """Write `.metadata` and the files that it names; chunk by chunk to the files in turn."""
    streams = [io.BytesIO() for _ in range(files)]
    turn = itertools.cycle(range(files))
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}

    def put(index: MetadataIndex, value: Any) -> None:
        at = next(turn)
        start = streams[at].tell()
        torch.save(value, streams[at])
        stored[index] = _StorageInfo(f"__{at}_0.distcp", start, streams[at].tell() - start)

    for key, tensor in tensors.items():
        chunks = []
        for offset, size in cut(key, tensor):
            slices = tuple(slice(start, start + n) for start, n in zip(offset, size))
            put(MetadataIndex(key, torch.Size(offset)), tensor[slices].clone())
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.size(), chunks
        )
    for key, value in objects.items():
        put(MetadataIndex(key), [value])
        described[key] = BytesStorageMetadata()
    for at, stream in enumerate(streams):
        (directory / f"__{at}_0.distcp").write_bytes(stream.getvalue())
    with open(directory / ".metadata", "wb") as file:
        pickle.dump(Metadata(described, storage_data=stored), file)


def save_torch_dist(
    folder: Path,
    model: Mapping[str, Tensor],
    shape: Shape,
    *,
    cut: Cut = by_rank,
    more: Mapping[str, Tensor] | None = None,
    common: Mapping[str, Any] | None = None,
    args: Mapping[str, Any] | None = None,
    as_object: bool = False,
    plain_dcp: bool = False,
) -> Path:
    """Write `model` as a save of Megatron core at iteration 10.

    Args:
        more: tensors under keys of their own, such as optimizer state.
        common: entries beside those of every save.
        args: flags of the run beside those of its shape.
        as_object: the common state is an object in the index, as since July 2026.
        plain_dcp: written by torch.distributed.checkpoint itself, each tensor whole.
    """
    trunk = "encoder" if shape.bert else "decoder"
    objects: dict[str, Any] = {
        f"{trunk}.layers.{linear}._extra_state/shard_{layer}_{shape.layers}": None
        for linear in LINEARS
        for layer in range(shape.layers)
    }
    return save_keys(
        folder,
        {**keys_of(model, shape), **(more or {})},
        objects,
        {**flags(shape, 2, 1), **(args or {})},
        cut=cut,
        common=common,
        as_object=as_object,
        plain_dcp=plain_dcp,
    )


def save_keys(
    folder: Path,
    tensors: Mapping[str, Tensor],
    objects: Mapping[str, Any],
    args: Mapping[str, Any],
    *,
    cut: Cut = by_rank,
    common: Mapping[str, Any] | None = None,
    as_object: bool = False,
    plain_dcp: bool = False,
) -> Path:
    """Write tensors and objects by key as `save_torch_dist` does, of a run with these `args`."""
    directory = folder / "iter_0000010"
    directory.mkdir(parents=True)
    content = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "tokens": 960,
        **(common or {}),
    }
    objects = dict(objects)
    if as_object:
        objects["common_state/shard_0_1"] = content
    else:
        torch.save(content, directory / "common.pt")
    if plain_dcp:
        state = {**tensors, **{key: [value] for key, value in objects.items()}}
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save_by_torch(state, checkpoint_id=directory, planner=planner, no_dist=True)
    else:
        save_chunks(directory, tensors, objects, cut=cut)
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(described))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return directory
