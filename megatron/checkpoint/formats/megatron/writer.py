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
from megatron.checkpoint.boxes import from_slices, overlap, whole
from megatron.checkpoint.files import durable, torch_file
from megatron.checkpoint.files.safetensors_header import tensor_bytes
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.formats.megatron.args import args_of_config
from megatron.checkpoint.source import CheckpointSource, TensorDescription, WriteOptions
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

    def chunk_of(self, stage: int, chunk: int, parameters: Sequence[str]) -> list[str]:
        """Return our names of a virtual stage's parameters, in the order of Megatron's modules."""
        virtual = chunk * self.pp + stage
        last = virtual == self.pp * self.chunks - 1
        found = []
        for name in sorted(parameters, key=names.module_order):
            section, layer, _, _ = names.module_order(name)
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
    source: CheckpointSource, *, tp: int, pp: int, chunks: int, padded_rows: int
) -> FileLayout:
    """Return the layout of `source` at a TP and PP, with so many rows of the vocabulary in all.

    Raises:
        CheckpointError: its layers do not divide over the stages, or its heads over tp ranks.
    """
    model: Mapping[str, Any] = source.config.get("model", {})
    args_of_config(source.config)  # refuses a model that Megatron does not have
    unknown = [name for name in _parameters(source) if not names.is_known(name)]
    if unknown:
        raise CheckpointError(
            "only GPT and BERT models are written in Megatron's layout",
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
        chunk_names = layout.chunk_of(pp, chunk, parameters)
        flat = {
            names.megatron_name(name, first_layer=layout.first_layer(pp, chunk)): _part(
                source, f"model/{name}", layout, tp
            )
            for name in chunk_names
        }
        heads = {name: part for name, part in flat.items() if names.is_beside_language_model(name)}
        trunk = {name: part for name, part in flat.items() if name not in heads}
        state: dict[str, Any] = {"language_model": _nested(trunk), **_nested(heads)}
        if layout.has_head_copy(pp, chunk):
            # Before the heads, as modules are registered.
            chunk_names.insert(len(trunk), names.WORD)
            copy = _part(source, f"model/{names.WORD}", layout, tp)
            state["word_embeddings_for_head"] = {"weight": copy}
        content["model" if layout.chunks == 1 else f"model{chunk}"] = state
        rank_names += chunk_names
    kinds = _kinds(source) if optimizer else []
    if kinds:
        content["optimizer"] = _optimizer(source, layout, rank_names, kinds, tp, args)
        content["lr_scheduler"] = scheduler_entry(source)
    return content


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


def run_args(
    source: CheckpointSource, *, padded_rows: int, tp: int, pp: int, experts: bool = False
) -> dict[str, Any]:
    """Return Megatron's `args` of the run that saved `source`, as one of tp x pp ranks.

    Args:
        padded_rows: rows of the vocabulary, padding included.
        experts: whether the layout of the files holds models with experts.

    Raises:
        CheckpointError: Megatron has no flags for this model.
    """
    progress = source.progress
    return {
        **args_of_config(source.config, experts=experts),
        "padded_vocab_size": padded_rows,
        "make_vocab_size_divisible_by": _divisor(source, padded_rows, tp),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "consumed_train_samples": int(progress.get("consumed_samples", 0)),
        "consumed_train_tokens": int(progress.get("consumed_tokens", 0)),
        "consumed_valid_samples": int(progress.get("consumed_valid_samples", 0)),
    }


def _args(source: CheckpointSource, layout: FileLayout) -> dict[str, Any]:
    return {
        **run_args(source, padded_rows=layout.padded_rows, tp=layout.tp, pp=layout.pp),
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.layers if layout.chunks > 1 else None,
    }


def _parameters(source: CheckpointSource) -> list[str]:
    return [name.removeprefix("model/") for name in source.tensors if name.startswith("model/")]


def _divisor(source: CheckpointSource, padded_rows: int, tp: int) -> int:
    """Return a --make-vocab-size-divisible-by from which Megatron computes the same padded size."""
    rows = source.tensors[f"model/{names.WORD}"].global_shape[0]
    flags: Mapping[str, Any] = source.config.get("tokenizer", {})
    divisor = flags.get("make_vocab_size_divisible_by") or 128
    if padded_vocab_size(rows, divisible_by=divisor, tp=tp) == padded_rows:
        return int(divisor)
    return padded_rows // tp


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
                **group_entry(args, steps, decayed=decayed),
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
    return {"optimizer": inner, "fp32_from_fp16_params": masters, **grad_scaler_entry(kept)}


def group_entry(args: Mapping[str, Any], steps: int, *, decayed: bool) -> dict[str, Any]:
    """Return the entry of a group of parameters, without their numbers."""
    return {
        "lr": args.get("lr", 0.0),
        "weight_decay": args.get("weight_decay", 0.01) if decayed else 0.0,
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "bias_correction": True,
        "wd_mult": float(decayed),
        "lr_mult": 1.0,
        "step": steps,
    }


def _decay_groups(
    tensors: Mapping[str, TensorDescription], held: Sequence[str]
) -> Iterator[tuple[bool, list[str]]]:
    for decayed in (True, False):
        members = [
            name for name in held if (len(tensors[f"model/{name}"].global_shape) > 1) == decayed
        ]
        if members:
            yield decayed, members


def grad_scaler_entry(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with the loss scale, from our scalars; empty for a constant scale."""
    scaler = kept.get("loss_scaler") or {}
    if "scale" not in scaler:
        return {}
    return {
        "grad_scaler": {
            "scale": torch.tensor([float(scaler["scale"])]),
            "growth_tracker": int(scaler["good_iterations"]),
            "hysteresis_tracker": int(scaler["overflows_left"]),
        }
    }


def scheduler_entry(source: CheckpointSource) -> dict[str, Any]:
    """Return the state of Megatron's schedule, a function of samples, which its loader requires."""
    schedule: Mapping[str, Any] = source.config.get("schedule", {})
    training: Mapping[str, Any] = source.config.get("training", {})
    batch = int(training.get("global_batch_size") or 1)
    whole_run = training.get("train_samples") or int(training.get("train_iters") or 1) * batch
    decay = schedule.get("lr_decay_samples") or int(schedule.get("lr_decay_iters") or 0) * batch
    decay = int(decay or whole_run)
    warmup = schedule.get("lr_warmup_samples") or int(schedule.get("lr_warmup_iters") or 0) * batch
    warmup = int(warmup or float(schedule.get("lr_warmup_fraction") or 0.0) * decay)
    return {
        "max_lr": schedule.get("lr", 0.0),
        "min_lr": schedule.get("min_lr", 0.0),
        "warmup_steps": warmup,
        "lr_warmup_steps": warmup,
        "decay_steps": decay,
        "lr_decay_steps": decay,
        "decay_style": schedule.get("lr_decay_style", "linear"),
        "lr_decay_style": schedule.get("lr_decay_style", "linear"),
        "num_steps": int(source.progress.get("consumed_samples", 0)),
    }
