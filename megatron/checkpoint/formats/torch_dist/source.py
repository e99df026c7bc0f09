"""Megatron core's `torch_dist` checkpoints as a source, at whatever layout they were saved.

Files hold whole tensors, so parallelism does not show. Optimizer state is read where it is kept by
model key; the distributed optimizer's own buffers are not, of which a warning tells. Random states
are not loaded: they are valid only for the ranks and the program that saved them.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box, overlap
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.durable import from_os_error
from megatron.checkpoint.files.safetensors_io import dtype_code_of, dtype_of
from megatron.checkpoint.formats.megatron import facts
from megatron.checkpoint.formats.megatron.args import config_of_args, decoder_of_args
from megatron.checkpoint.formats.megatron.names import WORD, has_vocabulary_rows
from megatron.checkpoint.formats.megatron.t5_names import DECODER, t5_module_order
from megatron.checkpoint.formats.torch_dist import names
from megatron.checkpoint.formats.torch_dist.index import METADATA, StoredIndex
from megatron.checkpoint.source import SourceBase, SourceOptions, TensorDescription
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject

FORMAT_NAME = "torch_dist"
DESCRIPTION, COMMON = "metadata.json", "common.pt"
_COMMON_KEY = "common_state/shard_0_1"  # instead of a file, since July 2026
_MASTER = "master"


class _Place(NamedTuple):
    """Where a tensor is: its key, its leading indices there, and the grid that it is cut into.

    With a `grid`, the stored tensor has the grid's axes, and one more with the elements of a cell.
    """

    key: str
    leading: tuple[int, ...]
    cell: tuple[int, ...] | None = None


def is_torch_dist(directory: Path) -> bool:
    """Return whether a folder is of this layout, whole or not, by the names in it."""
    return (directory / METADATA).is_file() or (
        (directory / DESCRIPTION).is_file() and any(directory.glob("*.distcp"))
    )


class TorchDistSource(SourceBase):
    """One `torch_dist` checkpoint: weights, and optimizer state where it is by model key."""

    format_name = FORMAT_NAME

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        _check_description(directory)
        self._index = StoredIndex(directory)
        self._common = self._read_common()
        args = self._common.get("args")
        self._args = vars(args) if isinstance(args, argparse.Namespace) else {}
        self._config = config_of_args(self._args, experts=True)
        keys = [key for key in self._index.tensors if not names.is_optimizer(key)]
        self._is_t5 = names.is_t5(keys)
        self._our_names = names.our_t5_names if self._is_t5 else names.our_names
        self._places = self._find_parameters(keys)
        self._rows = facts.true_rows(
            self._index.tensors[self._places[f"model/{WORD}"].key].shape[0],
            self._common,
            self._args,
            options,
            tp=int(self._args.get("tensor_model_parallel_size") or 1),
        )
        self._places |= self._find_state()
        self._tensors = {name: self._description(name) for name in self._places}

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
        return facts.progress(self._common, self._args, self.directory)

    @property
    def scalars(self) -> JsonObject:
        """The number of updates and the loss scale; empty without optimizer state."""
        if not any(name.startswith("optimizer/") for name in self._places):
            return {}
        states = _optimizers(self._common)
        steps = [count for state in states for count in _step_counts(state)]
        if not steps:
            raise self._error(
                "optimizer state without the number of updates",
                fix="load the weights alone (--finetune)",
            )
        return {"optimizer": {"steps": steps[0], "loss_scaler": facts.loss_scaler(states[0])}}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`, from the chunks that hold them."""
        place = self._places[name]
        if place.cell is not None:
            return self._read_cells(place, place.cell, name, box)
        stored = Box((*place.leading, *box.offset), (1,) * len(place.leading) + box.shape)
        return self._index.read(place.key, stored).reshape(box.shape)

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Check the sums of part `share` of `of` parts of the archives."""
        for item in sorted(self._index.items)[share::of]:
            with self._index.window(item) as window:
                unpickle.check(window)

    def _read_cells(self, place: _Place, cell: tuple[int, ...], name: str, box: Box) -> Tensor:
        """Return `box` of a tensor that is kept as a grid of flattened cells."""
        full = Box((*place.leading, *box.offset), (1,) * len(place.leading) + box.shape)
        result = torch.empty(full.shape, dtype=dtype_of(self._tensors[name].dtype_code))
        grid = self._index.tensors[place.key].shape[:-1]
        for at in _cells(full, cell, grid):
            cell_box = Box(tuple(i * n for i, n in zip(at, cell)), cell)
            common = overlap(cell_box, full)
            if common is not None:
                flat = Box((*at, 0), (1,) * len(at) + (math.prod(cell),))
                values = self._index.read(place.key, flat).reshape(cell)
                result[common.within(full).slices] = values[common.within(cell_box).slices]
        return result.reshape(box.shape)

    def _read_common(self) -> Mapping[str, Any]:
        if (self.directory / COMMON).is_file():
            common = unpickle.load(self.directory / COMMON)
        elif _COMMON_KEY in self._index.objects:
            common = self._index.read_object(_COMMON_KEY)
        else:
            raise self._error(
                f"neither {COMMON} nor the object {_COMMON_KEY} is there, so that the flags of "
                "its run are unknown",
                fix="copy the checkpoint whole",
            )
        if not isinstance(common, Mapping):
            raise self._error(f"{COMMON} holds a {type(common).__name__}", "copy it whole")
        return common

    def _names_under(self, key: str) -> list[tuple[str, tuple[int, ...]]]:
        """Return our names of the parameters under a model key, with their leading indices."""
        shape = self._index.tensors[key].shape
        return list(self._our_names(key, shape[0] if shape else 0))

    def _find_parameters(self, keys: Sequence[str]) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        unknown: list[str] = []
        for key in keys:
            if _is_of_run(key):
                continue
            found = self._names_under(key)
            if not found:
                unknown.append(key)
            for ours, leading in found:
                if f"model/{ours}" in places:
                    other = places[f"model/{ours}"].key
                    self._check_double(ours, key, other)
                    continue
                places[f"model/{ours}"] = _Place(key, leading)
        if unknown or f"model/{WORD}" not in places:
            raise CheckpointError(
                "the checkpoint is not of a GPT, BERT or T5 that this program supports",
                found=f"{self.directory} holds {', '.join(unknown[:6])}"
                if unknown
                else f"{self.directory} holds no word embedding",
                fix="only GPT, BERT and T5 models are read; hybrid models and others are not",
            )
        bare = [name.removeprefix("model/") for name in places]
        order = names.model_order
        if self._is_t5:
            depth = len(facts.layers_by_stack(bare).get(DECODER, ()))
            self._config[CONFIG_GROUP] = decoder_of_args(self._args, layers=depth)
            order = t5_module_order
        facts.check_layers(bare, self._config, self.directory)
        return {f"model/{name}": places[f"model/{name}"] for name in sorted(bare, key=order)}

    def _check_double(self, ours: str, key: str, other: str) -> None:
        """Raise CheckpointError if two keys of one parameter hold different values."""
        tensors = [self._index.tensors[each] for each in (key, other)]
        boxes = [Box((0,) * len(stored.shape), stored.shape) for stored in tensors]
        values = [self._index.read(each, box) for each, box in zip((key, other), boxes)]
        if not torch.equal(*values):
            raise self._error(f"{key} and {other} are both {ours}, with other values")

    def _find_state(self) -> dict[str, _Place]:
        found: dict[str, _Place] = {}
        unread: list[str] = []
        for key in self._index.tensors:
            state = names.state_key(key)
            if state is None or state.model_key not in self._index.tensors:
                unread += [key] if names.is_optimizer(key) else []
                continue
            if state.kind == _MASTER and self._index.tensors[state.model_key].dtype.itemsize > 2:
                continue  # the weights themselves
            cell = self._cell(key, state.model_key)
            for ours, leading in self._names_under(state.model_key):
                found[f"optimizer/{state.kind}/{ours}"] = _Place(key, leading, cell)
        kinds = dict.fromkeys(name.split("/")[1] for name in found)
        self._warn_of_unread(unread)
        wanted = (
            f"optimizer/{kind}/{name.removeprefix('model/')}"
            for name in self._places
            for kind in kinds
        )
        return {name: found[name] for name in wanted if name in found}

    def _cell(self, key: str, model_key: str) -> tuple[int, ...] | None:
        """Return the shape of the cells that `key` is cut into; None if it is as the weights are.

        Raises:
            CheckpointError: it has neither layout.
        """
        shape, model_shape = self._index.tensors[key].shape, self._index.tensors[model_key].shape
        if shape == model_shape:
            return None
        grid = shape[:-1]
        if len(grid) == len(model_shape) and all(
            n and not size % n for n, size in zip(grid, model_shape)
        ):
            cell = tuple(size // n for n, size in zip(grid, model_shape))
            if math.prod(cell) == shape[-1]:
                return cell
        raise self._error(f"{key} is {list(shape)}, and {model_key} is {list(model_shape)}")

    def _description(self, name: str) -> TensorDescription:
        place = self._places[name]
        stored = self._index.tensors[place.key]
        shape = stored.shape
        if place.cell is not None:
            shape = tuple(n * size for n, size in zip(shape, place.cell))
        shape = shape[len(place.leading) :]
        if has_vocabulary_rows(name.split("/")[-1]):
            shape = (self._rows, *shape[1:])
        return TensorDescription(dtype_code_of(stored.dtype), shape)

    def _warn_of_unread(self, keys: Sequence[str]) -> None:
        objects = [key for key in self._index.objects if names.is_optimizer(key)]
        if not keys and not objects:
            return
        kind = (self._common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
        log.warning(
            f"{self.directory} keeps its optimizer in buffers of its ranks "
            f"({kind or 'an older layout'}: {[*keys, *objects][0]}), which is not read: only "
            "weights are loaded; Megatron-LM saves it by parameter with "
            "--dist-ckpt-optim-fully-reshardable"
        )

    def _error(self, found: str, fix: str = "copy the checkpoint whole") -> CheckpointError:
        return CheckpointError(
            "a torch_dist checkpoint does not hold what it should",
            found=f"{self.directory}: {found}",
            fix=fix,
        )


def _check_description(directory: Path) -> None:
    """Raise CheckpointError if a file that is written last is missing, or of another kind."""
    path = directory / DESCRIPTION
    for missing in (path, directory / METADATA):
        if not missing.is_file():
            raise CheckpointError(
                "a torch_dist checkpoint is not whole",
                found=f"no {missing.name} in {directory}, which is written at the end of a save",
                fix="copy it again with its hidden files (cp -r, rsync -a), or load another "
                "iteration",
            )
    try:
        described = json.loads(path.read_bytes())
        kind = (described["sharded_backend"], described["sharded_backend_version"])
    except OSError as error:
        raise from_os_error(error, "reading a checkpoint") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the description of a checkpoint cannot be read",
            found=f"{path}: {type(error).__name__}: {error}",
            fix="copy the checkpoint whole",
        ) from error
    if kind != (FORMAT_NAME, 1):
        raise CheckpointError(
            "the checkpoint is of a distributed layout that this program does not read",
            found=f"{path}: {kind[0]}, version {kind[1]}",
            fix="save it as torch_dist (--ckpt-format torch_dist of Megatron-LM)",
        )


def _is_of_run(key: str) -> bool:
    """Return whether a key is of the run, not of its model: random states and its own records."""
    return key.startswith(("rng_state", "common_state", "rerun_state_machine"))


def _cells(box: Box, cell: Sequence[int], grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places in the grid of all cells that `box` touches."""
    places: list[tuple[int, ...]] = [()]
    for start, length, size, count in zip(box.offset, box.shape, cell, grid):
        last = min(count, -(-(start + length) // size))
        places = [(*place, at) for place in places for at in range(start // size, last)]
    yield from places


def _optimizers(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of all optimizers: one, or by number where experts have their own."""
    state = common.get("optimizer")
    if not isinstance(state, Mapping):
        return [{}]
    numbered = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    return [each for each in numbered or [state] if isinstance(each, Mapping)]


def _step_counts(state: Mapping[str, Any]) -> Iterator[int]:
    inner = state.get("optimizer", state)
    if not isinstance(inner, Mapping):
        return
    kept = inner.get("state")
    if isinstance(kept, Mapping) and "common_step" in kept:
        yield int(kept["common_step"])
    for group in inner.get("param_groups", ()):
        if "step" in group:
            yield int(group["step"])
