"""Classic Megatron-LM checkpoints, versions 0 to 3 and any TP and PP, as a source.

What differs between versions is the order of rows and some names (`names`). Files are mapped, so
that only what is needed is read. Random states are not loaded: they are valid only for the ranks
and the program that saved them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box, from_slices, overlap
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.safetensors_io import dtype_code_of, dtype_of
from megatron.checkpoint.folder import seal
from megatron.checkpoint.formats.megatron import facts, names, t5_names
from megatron.checkpoint.formats.megatron.args import config_of_args, decoder_of_args
from megatron.checkpoint.formats.megatron.files import (
    HEAD_COPY,
    SHARDED_OPTIMIZERS,
    Key,
    MegatronFiles,
    RankFile,
)
from megatron.checkpoint.source import SourceBase, SourceOptions, TensorDescription
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject
from megatron.mpu import partition as partitions

NEWEST_VERSION = 3.0


class _Place(NamedTuple):
    """Where a parameter's parts lie: a pipeline stage, and the key in its ranks' files."""

    stage: int
    key: Key


class MegatronSource(SourceBase):
    """One Megatron checkpoint: weights, and optimizer state where its files have it by rank."""

    format_name = "megatron"

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        self.seal = seal.of(directory)
        self._files = MegatronFiles(directory)
        first = self._files.rank(0, 0)
        stages = (self._files.rank(0, pp) for pp in range(self._files.pp))
        self._is_t5 = t5_names.is_t5(key.name for stage in stages for key in stage.parameters)
        self._names = t5_names.T5_NAMES if self._is_t5 else names.NAMES
        self._config = config_of_args(first.args)
        self._gated = names.is_gated(self._config)
        self._order = names.row_order(self._config, _version(first))
        self._places, self._copies = self._find_parameters()
        padded = first.parameters[self._places[names.WORD].key].shape[0] * self._files.tp
        self._rows = facts.true_rows(padded, first.content, first.args, options, tp=self._files.tp)
        self._tensors = dict(self._describe())

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Dtype and whole shape of every tensor, in the order of the model."""
        return self._tensors

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """The config groups from `args`."""
        return self._config

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of the run; empty for a release, from which a run starts."""
        first = self._files.rank(0, 0)
        return facts.progress(first.content, first.args, self.directory)

    @property
    def scalars(self) -> JsonObject:
        """The number of updates and the loss scale; empty without optimizer state."""
        shard = self._files.rank(0, 0).optimizer
        if shard is None:
            return {}
        return {"optimizer": {"steps": shard.steps, "loss_scaler": dict(shard.scaler)}}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`, from the ranks that hold them, rows in our order."""
        description, parameter = self._tensors[name], _parameter_of(name)
        place = self._places[parameter]
        result = torch.empty(box.shape, dtype=dtype_of(description.dtype_code))
        partition = names.partition_of_name(parameter, gated=self._gated)
        holders = self._files.tp if partition is not None else 1
        for tp in range(holders):
            rank = self._files.rank(tp, place.stage)
            stored = self._stored(rank, name, place.key)
            shape = partitions.global_shape(stored.shape, partition, holders)
            if stored.dtype != result.dtype or shape[1:] != description.global_shape[1:]:
                raise rank.error(
                    f"{place.key.name} is {stored.dtype} {list(stored.shape)}, unlike on rank 0",
                    "copy the checkpoint whole, from one save",
                )
            local: Tensor | None = None
            for piece in partitions.pieces(shape, partition, tp, holders):
                local_box, global_box = from_slices(piece.local), from_slices(piece.global_)
                common = overlap(global_box, box)
                if common is None:
                    continue
                if local is None:
                    local = self._order.to_ours(parameter, stored)
                values = local[common.within(global_box).moved(local_box.offset).slices]
                result[common.within(box).slices] = values
        return result

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Check the sums of part `share` of `of` parts of the files, and that copies are equal."""
        if self.seal is not None:
            seal.check_digests(self.directory, self.seal, share=share, of=of)
        else:
            for path in self._files.all_paths[share::of]:
                unpickle.check(path)
        for parameter, place in self._copies[share::of]:
            for tp in range(self._files.tp):
                rank = self._files.rank(tp, place.stage)
                original = self._places[parameter]
                copy = rank.parameters[place.key]
                values = self._files.rank(tp, original.stage).parameters[original.key]
                if not torch.equal(copy, values):
                    raise rank.error(
                        f"{place.key.name} differs from {original.key.name} of the first stage, "
                        "whose copy it should be",
                        "it is not of one save, or its training had gone wrong: use another",
                    )

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _find_parameters(self) -> tuple[dict[str, _Place], list[tuple[str, _Place]]]:
        """Return the places of our parameters, and those of copies of the first stage's tables."""
        places: dict[str, _Place] = {}
        copies: list[tuple[str, _Place]] = []
        unknown: list[str] = []
        tied = not self._config.get("model", {}).get("untie_embeddings_and_output_weights")
        for stage, key, first_layer in self._keys():
            ours = self._names.our_name(key.name, first_layer=first_layer)
            if key.name == HEAD_COPY or (tied and ours == names.OUTPUT):
                copies.append((names.WORD, _Place(stage, key)))
            elif self._is_t5 and stage and ours in (names.WORD, names.POSITION):
                copies.append((ours, _Place(stage, key)))  # where the decoder begins
            elif ours is None:
                unknown.append(key.name)
            elif ours in places:
                raise self._files.rank(0, stage).error(
                    f"{key.name} of stage {stage} is {ours} again",
                    "copy the checkpoint whole, from one save",
                )
            else:
                places[ours] = _Place(stage, key)
        if unknown or names.WORD not in places:
            raise CheckpointError(
                "the checkpoint is not of a GPT, BERT or T5 that this program supports",
                found=f"{self.directory} holds {', '.join(unknown[:6])}"
                if unknown
                else f"{self.directory} holds no word embedding",
                fix="only GPT, BERT and T5 models are read",
            )
        if self._is_t5:
            depth = len(facts.layers_by_stack(places).get(t5_names.DECODER, ()))
            first = self._files.rank(0, 0)
            self._config[CONFIG_GROUP] = decoder_of_args(first.args, layers=depth)
        facts.check_layers(places, self._config, self.directory)
        ordered = sorted(places.items(), key=lambda item: self._names.module_order(item[0]))
        return dict(ordered), copies

    def _keys(self) -> Iterator[tuple[int, Key, int]]:
        """Yield (stage, key, first layer of its stack there) in the order of the model."""
        by_chunk: dict[tuple[int, int], list[Key]] = {}
        for stage in range(self._files.pp):
            for key in self._files.rank(0, stage).parameters:
                by_chunk.setdefault((key.chunk, stage), []).append(key)
        first_layers: Counter[str] = Counter()  # by stack
        for (_, stage), keys in sorted(by_chunk.items()):
            found = {key: self._names.our_name(key.name) or "" for key in keys}
            for key, name in found.items():
                yield stage, key, first_layers[facts.stack_of(name)]
            for stack, layers in facts.layers_by_stack(found.values()).items():
                first_layers[stack] += len(layers)

    def _describe(self) -> Iterator[tuple[str, TensorDescription]]:
        for parameter, place in self._places.items():
            yield f"model/{parameter}", self._description(parameter, place, "model")
        if (shard := self._files.rank(0, 0).optimizer) is None:
            self._warn_of_unread_optimizer()
            return
        for parameter, place in self._places.items():
            for kind in shard.tensors:
                name = f"optimizer/{kind}/{parameter}"
                yield name, self._description(parameter, place, name)

    def _description(self, parameter: str, place: _Place, name: str) -> TensorDescription:
        stored = self._stored(self._files.rank(0, place.stage), name, place.key)
        partition = names.partition_of_name(parameter, gated=self._gated)
        shape = partitions.global_shape(stored.shape, partition, self._files.tp)
        if names.has_vocabulary_rows(parameter):
            shape = (self._rows, *shape[1:])
        return TensorDescription(dtype_code_of(stored.dtype), shape)

    def _stored(self, rank: RankFile, name: str, key: Key) -> Tensor:
        tensors: Mapping[Key, Tensor] = rank.parameters
        if name.startswith("optimizer/"):
            kind = name.split("/")[1]
            tensors = {} if rank.optimizer is None else rank.optimizer.tensors.get(kind, {})
        if key not in tensors:
            raise rank.error(f"no {name.partition('/')[0]} {key.name}", "copy the checkpoint whole")
        return tensors[key]

    def _warn_of_unread_optimizer(self) -> None:
        beside = [
            path.name
            for name in SHARDED_OPTIMIZERS
            for path in [self._files.paths[0, 0].parent / name]
            if path.is_file()
        ]
        if beside:
            log.warning(
                f"{self.directory} keeps its optimizer in {', '.join(beside)} as Megatron's "
                "distributed optimizer did before February 2024, which is not read: only weights "
                "are loaded"
            )


def _parameter_of(name: str) -> str:
    return name.split("/")[-1]


def _version(first: RankFile) -> float:
    if "checkpoint_version" not in first.content:
        log.warning(f"{first.path} has no checkpoint_version: it is read as version 0")
    version = float(first.content.get("checkpoint_version", 0))
    if version > NEWEST_VERSION or version not in (0.0, 1.0, 2.0, 3.0):
        raise CheckpointError(
            "the Megatron checkpoint is of a version that this program does not read",
            found=f"{first.path}: checkpoint_version {version:g}",
            fix="convert it to version 3 with the program that wrote it",
        )
    return version
