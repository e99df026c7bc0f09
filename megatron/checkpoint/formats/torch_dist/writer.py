"""Checkpoints in Megatron core's `torch_dist` layout, as its loaders of 0.16 and later take them.

Whole tensors under model keys, equal layers stacked, the flags and counters in `common.pt`, and
`metadata.json` last. Layouts do not show in it. Optimizer state is written by parameter, as
--dist-ckpt-optim-fully-reshardable does; random states are not: load it with --no-load-rng.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.files import durable, torch_file
from megatron.checkpoint.files.safetensors_header import tensor_bytes
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.formats.megatron import entries
from megatron.checkpoint.formats.megatron import writer as megatron_writer
from megatron.checkpoint.formats.megatron.args import refuse_without_core
from megatron.checkpoint.formats.megatron.names import WORD, has_vocabulary_rows
from megatron.checkpoint.formats.torch_dist import names
from megatron.checkpoint.formats.torch_dist.source import COMMON, DESCRIPTION, FORMAT_NAME
from megatron.checkpoint.model_kind import BERT, GPT, T5, kind_from_names
from megatron.checkpoint.source import CheckpointSource, TensorDescription, WriteOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from megatron.json_values import object_at
from megatron.tokenizer.tokenizer import padded_vocab_size

_MASTER, _MOMENTS = "master", ("exp_avg", "exp_avg_sq")
_SHARDING = "fully_reshardable"
_ROOM_BYTES = 4 << 20  # for the index, the flags and the headers of archives


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One stored tensor: the tensors of `source` that it is made of, stacked where `is_stack`."""

    parts: Sequence[str]
    is_stack: bool
    description: TensorDescription


def write_torch_dist(source: CheckpointSource, save: Path, options: WriteOptions) -> Path:
    """Write `source` as a distributed checkpoint into the folder `save`, and make it the latest.

    Weights without an iteration become a `release`. Holds one stacked tensor at a time.

    Raises:
        CheckpointError: the model is none of Megatron core's; there is no room; a release is there
            already. Nothing is left behind.
    """
    from megatron.checkpoint.formats.torch_dist import dcp_files  # takes a second to import

    tp, divisible_by = options.tensor_model_parallel_size, options.make_vocab_size_divisible_by
    rows = source.tensors[f"model/{WORD}"].global_shape[0]
    padded = padded_vocab_size(rows, divisible_by=divisible_by, tp=tp)
    args = entries.run_args(source, padded_rows=padded, tp=tp, pp=1, experts=True)
    refuse_without_core(source.config)
    if kind_from_names(source.tensors) == T5:
        _refuse_t5(source)
    stored = _entries(source, padded, optimizer=options.optimizer)
    iteration = options.iteration_of(source)
    needed = sum(tensor_bytes(*entry.description) for entry in stored.values()) + _ROOM_BYTES
    with megatron_writer.staged(save, iteration, needed) as stage:
        dcp_files.write(
            stage,
            {key: entry.description for key, entry in stored.items()},
            dict.fromkeys(_extra_states(source, stored)),  # None: without FP8
            lambda key: _read(source, stored[key]),
        )
        has_state = any(key.startswith("optimizer.") for key in stored)
        torch_file.save(stage / COMMON, _common(source, args, iteration, has_state=has_state))
        described = {
            "sharded_backend": FORMAT_NAME,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        durable.write_file(stage / DESCRIPTION, json.dumps(described).encode())
    final = megatron_writer.final_folder(save, iteration)
    log.info(f"wrote {final}: {len(stored)} tensors in Megatron core's distributed layout")
    return final


def _entries(source: CheckpointSource, padded: int, *, optimizer: bool) -> dict[str, _Entry]:
    """Return all stored tensors by key, in the order of the model."""
    by_key = _by_model_key(source)
    stored = {
        key: _entry(source, key, [f"model/{name}" for name in parts], padded)
        for key, parts in by_key.items()
    }
    kinds = dict.fromkeys(
        name.split("/")[1] for name in source.tensors if name.startswith("optimizer/")
    )
    if not optimizer or not kinds:
        return stored
    if any(".experts." in key for key in by_key):
        raise CheckpointError(
            "the optimizer's state of experts is not written in this layout: Megatron core keeps "
            "it in one optimizer or two, as the ranks of experts say",
            found=f"{source.directory} with optimizer state and experts",
            fix="leave it out: --no-optim",
        )
    if not kinds.keys() <= {_MASTER, *_MOMENTS}:
        raise CheckpointError(
            "only the state of AdamW is written in Megatron core's distributed layout",
            found=f"state of the kinds {', '.join(kinds)}",
            fix="leave it out: --no-optim",
        )
    # Of two keys of one parameter core looks for its state under the last.
    last_keys = {tuple(parts): key for key, parts in by_key.items()}
    for parts, key in last_keys.items():
        for kind, core_kind in (("model", "param"), *((each, each) for each in _MOMENTS)):
            names_of_parts = _state_names(source, parts, kind)
            if all(name in source.tensors for name in names_of_parts):
                state_key = f"optimizer.state.{core_kind}.{key}"
                stored[state_key] = _entry(source, key, names_of_parts, padded)
    return stored


def _state_names(source: CheckpointSource, parts: Sequence[str], kind: str) -> list[str]:
    if kind != "model":
        return [f"optimizer/{kind}/{name}" for name in parts]
    masters = [f"optimizer/{_MASTER}/{name}" for name in parts]
    # In fp32 the weights are their own masters; what is not updated has no state at all.
    if all(name in source.tensors for name in masters):
        return masters
    moments = [f"optimizer/{_MOMENTS[0]}/{name}" for name in parts]
    is_updated = all(name in source.tensors for name in moments)
    return [f"model/{name}" for name in parts] if is_updated else [_MASTER]


def _by_model_key(source: CheckpointSource) -> dict[str, list[str]]:
    """Return our parameters by model key: those of all layers together, if layers are equal."""
    kind = kind_from_names(source.tensors)
    parameters = [
        name.removeprefix("model/") for name in source.tensors if name.startswith("model/")
    ]
    if kind == T5:
        return _stacked({name: list(names.core_t5_keys(name)) for name in parameters})
    trunk = "decoder" if kind == GPT else "encoder"
    layers: dict[str, set[str]] = {}
    for name in parameters:
        if name.startswith("layers."):
            _, layer, inside = name.split(".", 2)
            layers.setdefault(layer, set()).add(inside)
    is_stacked = len({frozenset(inside) for inside in layers.values()}) <= 1
    with_experts = {layer for layer, inside in layers.items() if "mlp.router.weight" in inside}
    keys = {}
    for name in parameters:
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        has_experts = layer in with_experts
        keys[name] = list(
            names.core_keys(name, trunk=trunk, is_stacked=is_stacked, has_experts=has_experts)
        )
    return _stacked(keys)


def _stacked(keys: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return our parameters by model key, layers in order, from the model keys of each."""
    unknown = [name for name, of_name in keys.items() if not of_name]
    if unknown:
        raise CheckpointError(
            "Megatron core has no place for some parameters of this model",
            found=f"parameters such as {', '.join(unknown[:4])}",
            fix="write another format: sharded or huggingface",
        )
    found: dict[str, list[str]] = {}
    for name, of_name in keys.items():
        for key in of_name:
            found.setdefault(key, []).append(name)
    for parts in found.values():
        if len(parts) > 1:  # by layers as numbers, not as text
            parts.sort(key=lambda name: int(name.partition("layers.")[2].split(".")[0]))
    return found


def _refuse_t5(source: CheckpointSource) -> None:
    """Raise CheckpointError for a T5 that Megatron core does not have."""
    model = from_plain(ModelConfig, source.config.get("model", {}))
    has_bias = f"model/{WORD_BIAS}" in source.tensors
    groups, heads = model.query_groups, model.num_attention_heads
    refused = (
        (groups != heads, f"{groups} query groups of {heads} heads in cross attention"),
        (model.tied and not has_bias, "a tied head without a bias for each word"),
        (has_bias and not model.tied, "an untied head with a bias for each word"),
    )
    found = [what for is_given, what in refused if is_given]
    if found:
        raise CheckpointError(
            "Megatron core has no T5 like this one",
            found=", ".join(found),
            fix="write another format: sharded or huggingface",
        )


def _entry(source: CheckpointSource, key: str, parts: Sequence[str], padded: int) -> _Entry:
    code, shape = source.tensors[parts[0]]
    name = parts[0].split("/")[-1]
    if has_vocabulary_rows(name):
        shape = (padded, *shape[1:])
    is_stack = names.is_stacked(key)
    if is_stack:
        shape = (len(parts), *shape)
    return _Entry(parts=parts, is_stack=is_stack, description=TensorDescription(code, shape))


def _read(source: CheckpointSource, entry: _Entry) -> Tensor:
    code, shape = entry.description
    result = torch.zeros(shape, dtype=dtype_of(code))  # zeros: rows of padding
    for at, name in enumerate(entry.parts):
        box = whole(source.tensors[name].global_shape)
        into = result[at] if entry.is_stack else result
        into[box.slices] = source.read(name, box)
    return result


def _extra_states(source: CheckpointSource, stored: Mapping[str, _Entry]) -> Iterator[str]:
    for key, entry in stored.items():
        if not names.is_optimizer(key):
            yield from names.extra_state_keys(key, entry.description.global_shape)
    if kind_from_names(source.tensors) in (BERT, T5):
        modules = {key.rpartition(".")[0] for key in stored if not names.is_optimizer(key)}
        for head in ("lm_head.output_layer", "output_layer"):
            if head in modules:
                yield f"{head}._extra_state/shard_0_1"


def _common(
    source: CheckpointSource, args: Mapping[str, Any], iteration: int, *, has_state: bool
) -> dict[str, Any]:
    """Return all that is not a tensor: the flags, the counters and the optimizer's numbers."""
    rows = source.tensors[f"model/{WORD}"].global_shape[0]
    content: dict[str, Any] = {
        "args": argparse.Namespace(**args, iteration=iteration),
        "checkpoint_version": megatron_writer.VERSION,
        "iteration": iteration,
        "tokens": int(source.progress.get("consumed_tokens", 0)),
        "checkpoint_info": {
            "padded_vocab_size": args["padded_vocab_size"],
            "original_vocab_size": rows,
        },
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": _SHARDING,
        },
    }
    if not has_state:
        return content
    kept: Mapping[str, Any] = object_at(source.scalars, "optimizer")
    groups = [
        entries.group_entry(args, int(kept.get("steps", 0)), decayed=decayed)
        for decayed in (True, False)
    ]
    content["optimizer"] = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": _SHARDING,
        **entries.grad_scaler_entry(kept),
    }
    content["opt_param_scheduler"] = entries.scheduler_entry(source)
    return content
