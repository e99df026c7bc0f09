"""Checkpoints in Megatron-LM's classic layout, version 3, at any TP, PP and virtual stages.

Writes what Megatron's own loader reads: nested modules, flat args in plain types, numbered
optimizer state, the scheduler's numbers. Random states are not written: load it with --no-load-rng.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron import atomic, log
from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.boxes import from_slices, overlap, whole
from megatron.checkpoint.files import durable, torch_file
from megatron.checkpoint.files.safetensors_header import tensor_bytes
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.formats.megatron import entries, names
from megatron.checkpoint.formats.megatron.args import args_of_config, refuse_without_core
from megatron.checkpoint.formats.megatron.spellings import SPELLINGS, Spelling, T5Spelling
from megatron.checkpoint.model_kind import GPT, T5, kind_from_names
from megatron.checkpoint.source import CheckpointSource, TensorDescription, WriteOptions
from megatron.config.checkpoint import MegatronNames
from megatron.errors import CheckpointError
from megatron.json_values import object_at
from megatron.mpu import partition as partitions
from megatron.tokenizer.tokenizer import padded_vocab_size

VERSION = 3.0
FILE = "model_optim_rng.pt"
_MASTER = "master"
_FILE_BYTES = 1 << 20  # of one file's pickle, and of the file system's own blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """The parameters in each rank's file, and the padded vocabulary.

    `layers` are transformer layers of one virtual stage.
    """

    tp: int
    pp: int
    chunks: int
    layers: int
    padded_rows: int
    gated: bool
    tied: bool
    order: names.RowOrder
    spelling: Spelling
    trunk: str

    def chunk_of(self, stage: int, chunk: int, parameters: Sequence[str]) -> list[str]:
        """Return our names of a virtual stage's parameters, in the order of Megatron's modules."""
        if self.pp * self.chunks == 1:
            return sorted(parameters, key=self.spelling.order)
        virtual = chunk * self.pp + stage
        last = virtual == self.pp * self.chunks - 1
        found = []
        for name in sorted(parameters, key=self.spelling.order):
            section, layer, _, _ = self.spelling.order(name)
            if (virtual == 0, layer // self.layers == virtual, last)[section]:
                found.append(name)
        return found

    def first_layer(self, stage: int, chunk: int) -> int:
        """Return the index in the whole model of a virtual stage's layer 0."""
        return (chunk * self.pp + stage) * self.layers

    def has_head_copy(self, stage: int, chunk: int) -> bool:
        """Return whether a virtual stage ends with a copy of another stage's word embedding."""
        last = (stage, chunk) == (self.pp - 1, self.chunks - 1)
        return self.tied and last and self.pp * self.chunks > 1


def file_layout(
    source: CheckpointSource,
    *,
    tp: int,
    pp: int,
    chunks: int,
    padded_rows: int,
    megatron_names: MegatronNames,
) -> FileLayout:
    """Return the layout of `source` at a TP and PP, with so many rows of the vocabulary in all.

    Raises:
        CheckpointError: its layers do not divide over the stages, or its heads over tp ranks.
    """
    model: Mapping[str, Any] = source.config.get("model", {})
    args_of_config(source.config)  # refuses a model that Megatron does not have
    spelling = SPELLINGS[megatron_names]
    kind = kind_from_names(source.tensors)
    if kind == T5:
        _refuse_t5(source, stages=pp * chunks, megatron_names=megatron_names)
        spelling = T5Spelling()
    elif spelling.is_core:
        refuse_without_core(source.config)
    unknown = [name for name in _parameters(source) if not spelling.has(name)]
    if unknown:
        raise CheckpointError(
            "only GPT, BERT and T5 models are written in Megatron's layout",
            found=f"parameters such as {', '.join(unknown[:4])}",
            fix="use --checkpoint-format sharded, or --format sharded of the converter",
        )
    num_layers = int(model["num_layers"])
    if num_layers % (pp * chunks):
        raise CheckpointError(
            "Megatron keeps equally many layers on every pipeline stage, and these do not divide",
            found=f"{num_layers} layers, {pp} stages"
            + (f" of {chunks} virtual stages" if chunks > 1 else ""),
            fix=f"use a pipeline size that divides {num_layers}",
        )
    groups = int(model.get("num_query_groups") or model["num_attention_heads"])
    if groups % tp:
        raise CheckpointError(
            "the query groups do not divide over the tensor-parallel ranks",
            found=f"{groups} query groups, --tensor-model-parallel-size {tp}",
            fix=f"use a tensor-parallel size that divides {groups}",
        )
    return FileLayout(
        tp=tp,
        pp=pp,
        chunks=chunks,
        layers=num_layers // (pp * chunks),
        padded_rows=padded_rows,
        gated=names.is_gated(source.config),
        tied=not model.get("untie_embeddings_and_output_weights"),
        order=names.row_order(source.config, VERSION),
        spelling=spelling,
        trunk="decoder" if kind == GPT else "encoder",
    )


def _refuse_t5(source: CheckpointSource, *, stages: int, megatron_names: MegatronNames) -> None:
    """Raise CheckpointError for a T5 that Megatron does not have, or that is not written for it."""
    found = []
    if stages > 1:
        found.append(f"{stages} pipeline stages")
    if megatron_names is not MegatronNames.LEGACY:
        found.append(f"--megatron-names {megatron_names}")
    if f"model/{WORD_BIAS}" not in source.tensors:
        found.append("a head without a bias for each word (--disable-bias-linear)")
    if found:
        raise CheckpointError(
            "a T5 like this one is not written in Megatron's layout",
            found=", ".join(found),
            fix="use one pipeline stage and --megatron-names legacy, or write another format: "
            "sharded or huggingface",
        )


def write_megatron(source: CheckpointSource, save: Path, options: WriteOptions) -> Path:
    """Write `source` in Megatron's layout into the folder `save`, and make it the latest.

    Weights without an iteration become a `release`. Holds the tensors of one rank at a time.

    Raises:
        CheckpointError: the model does not fit the layout or Megatron; there is no room; a release
            is there already. Nothing is left behind.
    """
    tp, divisible_by = options.tensor_model_parallel_size, options.make_vocab_size_divisible_by
    rows = source.tensors[f"model/{names.WORD}"].global_shape[0]
    layout = file_layout(
        source,
        tp=tp,
        pp=options.pipeline_model_parallel_size,
        chunks=options.virtual_stages,
        padded_rows=padded_vocab_size(rows, divisible_by=divisible_by, tp=tp),
        megatron_names=options.megatron_names,
    )
    described = {
        name: known
        for name, known in source.tensors.items()
        if options.optimizer or name.startswith("model/")
    }
    iteration = options.iteration_of(source)
    with staged(save, iteration, needed_bytes(described, layout)) as stage:
        for pp in range(layout.pp):
            for tp in range(layout.tp):
                # Not kept in a name, which would hold it while the next one is put together.
                write_rank(
                    stage,
                    layout,
                    rank_content(
                        source,
                        layout,
                        tp=tp,
                        pp=pp,
                        iteration=iteration,
                        optimizer=options.optimizer,
                    ),
                    tp=tp,
                    pp=pp,
                )
    final = final_folder(save, iteration)
    log.info(f"wrote {final}: {layout.tp * layout.pp} files in Megatron's layout")
    return final


@contextmanager
def staged(save: Path, iteration: int, needed: int) -> Iterator[Path]:
    """Return a hidden folder in `save` to write to, which becomes the latest checkpoint.

    That is the one of `iteration`, or the release where that is 0. After an error nothing is left.

    Args:
        needed: bytes that will be written.

    Raises:
        CheckpointError: there is no room; the checkpoint is there already; a write failed.
    """
    stage = None
    try:
        folders.begin(save)
        folders.refuse_existing(save, iteration)
        folders.require_space(save, needed)
        if not iteration and (save / folders.RELEASE).exists():
            raise CheckpointError(
                "the folder holds a release already",
                found=str(save / folders.RELEASE),
                fix="save to another folder, or remove it",
            )
        stage = folders.make_stage(save, iteration)
        yield stage
        commit(stage, iteration)
        stage = None
    except OSError as error:
        raise durable.from_os_error(error, "writing the checkpoint") from error
    finally:
        if stage is not None and stage.exists():
            folders.remove(stage)


def final_folder(save: Path, iteration: int) -> Path:
    """Return the folder that `staged` makes of an iteration."""
    return save / (folders.iteration_name(iteration) if iteration else folders.RELEASE)


def needed_bytes(tensors: Mapping[str, TensorDescription], layout: FileLayout) -> int:
    """Return the bytes of all files: replicated tensors are in each, the embedding in two."""
    split = sum(tensor_bytes(*known) for known in tensors.values())
    copies = sum(
        tensor_bytes(*known)
        for name, known in tensors.items()
        if names.partition_of_name(name.split("/")[-1], gated=layout.gated) is None
        or name.endswith(names.WORD)
    )
    return split + layout.tp * copies + layout.tp * layout.pp * _FILE_BYTES


def rank_content(
    source: CheckpointSource,
    layout: FileLayout,
    *,
    tp: int,
    pp: int,
    iteration: int,
    optimizer: bool,
) -> dict[str, Any]:
    """Return the content of one rank's file; reads no box of `source` of another rank."""
    parameters = _parameters(source)
    args = _args(source, layout)
    content: dict[str, Any] = {
        "args": argparse.Namespace(**args, iteration=iteration),
        "checkpoint_version": VERSION,
        "iteration": iteration,
        "tokens": int(source.progress.get("consumed_tokens", 0)),
        "checkpoint_info": {
            "padded_vocab_size": layout.padded_rows,
            "original_vocab_size": source.tensors[f"model/{names.WORD}"].global_shape[0],
        },
    }
    rank_names: list[str] = []
    for chunk in range(layout.chunks):
        state, chunk_names = _chunk_state(source, layout, parameters, tp=tp, pp=pp, chunk=chunk)
        content["model" if layout.chunks == 1 else f"model{chunk}"] = state
        rank_names += chunk_names
    kinds = _kinds(source) if optimizer else []
    if kinds:
        content["optimizer"] = _optimizer(source, layout, rank_names, kinds, tp, args)
        content["lr_scheduler"] = entries.scheduler_entry(source)
    return content


def _chunk_state(
    source: CheckpointSource,
    layout: FileLayout,
    parameters: Sequence[str],
    *,
    tp: int,
    pp: int,
    chunk: int,
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a virtual stage, and our names of its parameters in module order."""
    chunk_names = layout.chunk_of(pp, chunk, parameters)
    first_layer = layout.first_layer(pp, chunk)
    flat = {
        layout.spelling.key(name, trunk=layout.trunk, first_layer=first_layer): _part(
            source, f"model/{name}", layout, tp
        )
        for name in chunk_names
    }
    copy = {}
    if layout.has_head_copy(pp, chunk):
        copy = {"weight": _part(source, f"model/{names.WORD}", layout, tp)}
    if layout.spelling.is_core:
        if copy:  # core's own name for it, where its modules have the projection
            order = layout.spelling.order
            place = sum(order(name) < order(names.OUTPUT) for name in chunk_names)
            chunk_names.insert(place, names.WORD)
            items = list(flat.items())
            items.insert(place, (layout.spelling.key(names.OUTPUT), copy["weight"]))
            flat = dict(items)
        return flat, chunk_names
    heads = {name: part for name, part in flat.items() if names.is_beside_language_model(name)}
    trunk = {name: part for name, part in flat.items() if name not in heads}
    state: dict[str, Any] = {"language_model": _nested(trunk), **_nested(heads)}
    if copy:  # before the heads, as modules are registered
        chunk_names.insert(len(trunk), names.WORD)
        state["word_embeddings_for_head"] = copy
    return state, chunk_names


def write_rank(
    stage: Path, layout: FileLayout, content: Mapping[str, Any], *, tp: int, pp: int
) -> dict[str, FileRecord]:
    """Write the file of one rank into the folder `stage`, durably; return its record by name."""
    name = f"mp_rank_{tp:02d}" if layout.pp == 1 else f"mp_rank_{tp:02d}_{pp:03d}"
    (stage / name).mkdir()
    record = torch_file.save(stage / name / FILE, dict(content))
    atomic.sync_directory(stage / name)
    return {f"{name}/{FILE}": record}


def commit(stage: Path, iteration: int) -> Path:
    """Make the finished `stage` the checkpoint of `iteration`, or the release where that is 0."""
    if iteration:
        return folders.commit(stage, iteration)
    final = stage.parent / folders.RELEASE
    token = stage.name[-8:]
    atomic.sync_directory(stage)
    stage.rename(final)
    atomic.sync_directory(final.parent)
    durable.replace_file(final.parent / folders.TRACKER, b"release\n", suffix=token)
    return final


def _args(source: CheckpointSource, layout: FileLayout) -> dict[str, Any]:
    return {
        **entries.run_args(source, padded_rows=layout.padded_rows, tp=layout.tp, pp=layout.pp),
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.layers if layout.chunks > 1 else None,
    }


def _parameters(source: CheckpointSource) -> list[str]:
    return [name.removeprefix("model/") for name in source.tensors if name.startswith("model/")]


def _part(source: CheckpointSource, name: str, layout: FileLayout, tp: int) -> Tensor:
    """Return one tp rank's part of `name` in Megatron's row order, padded with zero rows."""
    parameter = name.split("/")[-1]
    description = source.tensors[name]
    shape = description.global_shape
    if names.has_vocabulary_rows(parameter):
        shape = (layout.padded_rows, *shape[1:])
    partition = names.partition_of_name(parameter, gated=layout.gated)
    local = torch.zeros(
        partitions.local_shape(shape, partition, layout.tp), dtype=dtype_of(description.dtype_code)
    )
    for piece in partitions.pieces(shape, partition, tp, layout.tp):
        global_box = from_slices(piece.global_)
        box = overlap(global_box, whole(description.global_shape))
        if box is not None:
            at = box.within(global_box).moved(from_slices(piece.local).offset)
            local[at.slices] = source.read(name, box)
    return layout.order.from_ours(parameter, local)


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest values as Megatron does: the embedding's modules by name, others by dotted names."""
    nested: dict[str, Any] = {}
    for name, tensor in flat.items():
        top, _, rest = name.partition(".")
        into = nested.setdefault(top, {})
        if top == "embedding":
            module, _, rest = rest.partition(".")
            into = into.setdefault(module, {})
        into[rest] = tensor
    return nested


def _kinds(source: CheckpointSource) -> list[str]:
    found = (name.split("/")[1] for name in source.tensors if name.startswith("optimizer/"))
    return list(dict.fromkeys(found))


def _optimizer(
    source: CheckpointSource,
    layout: FileLayout,
    held: Sequence[str],
    kinds: Sequence[str],
    tp: int,
    args: Mapping[str, Any],
) -> dict[str, Any]:
    """Return state numbered by parameter: matrices first, as Megatron's weight decay groups."""
    kept: Mapping[str, Any] = object_at(source.scalars, "optimizer")
    steps = int(kept.get("steps", 0))
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    masters: list[list[Tensor]] = []
    for decayed, members in _decay_groups(source.tensors, held):
        groups.append(
            {
                "params": list(range(len(state), len(state) + len(members))),
                **entries.group_entry(args, steps, decayed=decayed),
            }
        )
        masters.append([])
        for name in members:
            values: dict[str, Any] = {
                kind: _part(source, f"optimizer/{kind}/{name}", layout, tp)
                for kind in kinds
                if kind != _MASTER
            }
            if "exp_avg" in values:
                values["step"] = torch.tensor(float(steps))
            state[len(state)] = values
            if _MASTER in kinds:
                masters[-1].append(_part(source, f"optimizer/{_MASTER}/{name}", layout, tp))
    inner = {"state": state, "param_groups": groups}
    if _MASTER not in kinds:
        return inner
    return {"optimizer": inner, "fp32_from_fp16_params": masters, **entries.grad_scaler_entry(kept)}


def _decay_groups(
    tensors: Mapping[str, TensorDescription], held: Sequence[str]
) -> Iterator[tuple[bool, list[str]]]:
    for decayed in (True, False):
        members = [
            name for name in held if (len(tensors[f"model/{name}"].global_shape) > 1) == decayed
        ]
        if members:
            yield decayed, members
