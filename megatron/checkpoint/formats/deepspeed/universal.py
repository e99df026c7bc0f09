"""DeepSpeed's universal layout as a source, and any source written in it.

Its converters join the parts of tensor-parallel ranks along dimension 0 by default. Where that
scrambles a parameter (gated halves, columns, replicated tables) it is undone here.
"""

# SAVE/latest_universal                          the name of the folder
# SAVE/global_stepN_universal/zero/PARAMETER/    fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
# SAVE/global_stepN_universal/mp_rank_*          counters; of a converted folder old weights too

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megatron
from megatron import atomic, log
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.files import durable, torch_file, unpickle
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES
from megatron.checkpoint.files.safetensors_io import dtype_code_of, dtype_of
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.deepspeed import files as deepspeed_files
from megatron.checkpoint.formats.deepspeed.facts import FactsSource, FolderFacts
from megatron.checkpoint.formats.deepspeed.parameters import (
    RECORD,
    UNIVERSAL_INFO,
    KnownParameter,
    RunRecord,
    universal_info,
)
from megatron.checkpoint.formats.deepspeed.shards import shape_of_shares
from megatron.checkpoint.formats.deepspeed.source import first_state, in_model_order, training_dtype
from megatron.checkpoint.formats.megatron.names import (
    has_vocabulary_rows,
    is_gated,
    megatron_name,
    partition_of_name,
)
from megatron.checkpoint.load.source_config import completed_progress
from megatron.checkpoint.source import (
    CheckpointSource,
    SourceOptions,
    TensorDescription,
    WriteOptions,
)
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject, object_at
from megatron.mpu.partition import join_slices

TRACKER = "latest_universal"
_SUFFIX = "_universal"
_FP32, _STEP = "fp32", "step"
_DEEPSPEED_VERSION = "0.19.0"  # a version of DeepSpeed that reads what is written here
# A loader reads as many groups of settings as its optimizer has; empty ones change nothing.
_EMPTY_GROUPS = 64
_FILE_BYTES = 4096  # of a .pt file, beside its tensor


class _Stored(NamedTuple):
    """One parameter's folder: its files by kind, and our facts about the parameter."""

    known: KnownParameter
    files: Mapping[str, Path]
    local_shape: tuple[int, ...] | None  # for files of ZeRO-3, which are flat


class UniversalSource(FactsSource):
    """A universal folder, opened; each file is mapped, and read on demand.

    Raises:
        CheckpointError: parameters are missing, of another shape than the model's, or not known.
    """

    format_name = "universal"

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        state = first_state(directory)
        self.facts = FolderFacts.of(state, options)
        self._tp = _tensor_parallel_size(state, self.facts)
        self._dtype = training_dtype(state)
        shapes = shape_of_shares(state)
        folders_of = {path.name: path for path in sorted((directory / "zero").iterdir())
                      if path.is_dir()}  # fmt: skip
        known = self.facts.parameters(folders_of)
        stored = {
            known[name].name: _Stored(known[name], _files_of(path), shapes.get(name))
            for name, path in folders_of.items()
        }
        self._stored = dict(in_model_order(stored.items()))
        self._warned: set[str] = set()
        self._described = dict(self._describe())
        self.facts.check_shapes(
            directory,
            {n.removeprefix("model/"): d.global_shape for n, d in self._described.items()
             if n.startswith("model/")},
        )  # fmt: skip

    @property
    def scalars(self) -> JsonObject:
        """The number of updates, and the loss scale of a run of ours."""
        if self.facts.record is not None:
            return self.facts.record.scalars
        steps = self._steps()
        return {} if steps is None else {"optimizer": {"steps": steps, "loss_scaler": {}}}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`."""
        described = self._described[name]
        stored, kind = self._find(name)
        values = self._whole(stored, kind)
        if values.shape[:1] != described.global_shape[:1] and described.global_shape:
            values = values[: described.global_shape[0]]
        return values[box.slices].to(dtype_of(described.dtype_code), copy=True)

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Compare the checksums of torch.save in part `share` of `of` parts of the files."""
        files = [path for stored in self._stored.values() for path in stored.files.values()]
        for path in files[share::of]:
            unpickle.check(path)

    def _describe(self) -> Iterator[tuple[str, TensorDescription]]:
        half = self._dtype != torch.float32
        for name, stored in self._stored.items():
            shape = self._shape(stored, _FP32)
            yield f"model/{name}", TensorDescription(dtype_code_of(self._dtype), shape)
        for name, stored in self._stored.items():
            for kind in stored.files:
                if kind == _STEP or (kind == _FP32 and not half):
                    continue
                ours = "master" if kind == _FP32 else kind
                description = TensorDescription("F32", self._shape(stored, kind))
                yield f"optimizer/{ours}/{name}", description

    def _find(self, name: str) -> tuple[_Stored, str]:
        space, _, rest = name.partition("/")
        if space == "model":
            return self._stored[rest], _FP32
        kind, ours = rest.split("/", 1)
        return self._stored[ours], _FP32 if kind == "master" else kind

    def _shape(self, stored: _Stored, kind: str) -> tuple[int, ...]:
        """Return the whole shape without padding rows; reads no values."""
        shape = tuple(self._whole(stored, kind, shape_only=True).shape)
        true = stored.known.shape
        if has_vocabulary_rows(stored.known.name) and true is not None and true[0] <= shape[0]:
            return true
        return shape

    def _whole(self, stored: _Stored, kind: str, *, shape_only: bool = False) -> Tensor:
        """Return one tensor as stored, or reassembled where the converter joined it wrongly.

        Args:
            shape_only: the values do not matter, and are not read.
        """
        name, path = stored.known.name, stored.files[kind]
        content = deepspeed_files.load(path)
        fields: Mapping[str, Any] = content if isinstance(content, Mapping) else {"param": content}
        values = fields.get("param")
        if not isinstance(values, Tensor):
            raise _damaged(path, f"no tensor called 'param' in {sorted(map(str, fields))}")
        values = values.detach()
        if (
            stored.local_shape is not None
            and values.shape != stored.local_shape
            and not fields.get("cat_dim")
        ):
            values = _unflattened(values, stored.local_shape, path, self._tp)
        if shape_only:
            values = values.to("meta")
        dim = fields.get("cat_dim")
        partition, rows = stored.known.partition, self.facts.rows
        if dim is None or self._tp == 1 or _in_parts(fields):
            return rows.to_ours(name, values)
        if (partition is None or partition.dim != dim or partition.blocks > 1
                       or rows.moves(name)):  # fmt: skip
            if values.shape[dim] % self._tp:
                raise _damaged(path, f"{tuple(values.shape)} is not {self._tp} parts")
            parts = [rows.to_ours(name, part) for part in values.chunk(self._tp, dim)]
            if partition is None:
                return parts[0] if shape_only else self._one_of(parts, name)
            return join_slices(parts, partition)
        return rows.to_ours(name, values)

    def _one_of(self, copies: list[Tensor], name: str) -> Tensor:
        if name not in self._warned and any(not torch.equal(copies[0], c) for c in copies[1:]):
            self._warned.add(name)
            log.warning(
                f"{self.directory}: the tensor-parallel ranks had different copies of {name}, "
                "which were written one after the other; the first is taken"
            )
        return copies[0]

    def _steps(self) -> int | None:
        for stored in self._stored.values():
            if _STEP in stored.files:
                return int(deepspeed_files.load(stored.files[_STEP]))
        path = self.directory / "zero" / "optimizer_state.pt"
        if not path.is_file():
            return None
        state = deepspeed_files.load(path).get("optimizer_state_dict", {}).get("state", {})
        return int(state[0]["step"]) if state and "step" in state[0] else None


def recognise(directory: Path) -> bool:
    """Return whether a folder is one universal checkpoint, by the names in it."""
    return (directory / "zero").is_dir() and any(
        entry.name.endswith("_model_states.pt") for entry in directory.iterdir()
    )


def write_universal(
    source: CheckpointSource, save: Path, options: WriteOptions | None = None
) -> Path:
    """Write `source` in the universal layout into the folder `save`, and name it the latest there.

    DeepSpeed's own loader reads it (`"checkpoint": {"load_universal": true}`) at any ZeRO stage and
    number of ranks into a model whose parameters have our names; with tensor parallelism at stages
    1 and 2. Vocabularies are padded to `make_vocab_size_divisible_by`, which must be that of the
    run that loads. Reads one tensor at a time. A loss scale is not part of the layout as written
    here: DeepSpeed begins with the one of its JSON.

    Raises:
        CheckpointError: there is no room, it is of no GPT, or is damaged; nothing is left behind.
    """
    options = options or WriteOptions()
    iteration = options.iteration_of(source)
    final = save / f"global_step{iteration}{_SUFFIX}"
    token = secrets.token_hex(4)
    stage = save / f".{final.name}.partial-{token}"
    described = _written_kinds(source, optimizer=options.optimizer)
    _refuse_other_models(source, described)
    needed = sum(
        ITEM_BYTES["F32"] * math.prod(source.tensors[name].global_shape) + _FILE_BYTES
        for kinds in described.values()
        for name in kinds.values()
    )
    try:
        folders.begin(save)
        folders.require_space(save, needed)
        (stage / "zero").mkdir(parents=True)
        parameters = _write_parameters(source, stage / "zero", described, options)
        _write_counters(source, stage, parameters, iteration, options)
        if final.exists():
            aside = save / f".{final.name}.replaced-{token}"
            final.rename(aside)
            stage.rename(final)
            folders.remove(aside)
        else:
            stage.rename(final)
        atomic.sync_directory(save)
        durable.replace_file(save / TRACKER, final.name.encode(), suffix=token)
    except OSError as error:
        raise durable.from_os_error(error, "writing the universal checkpoint") from error
    finally:
        if stage.exists():
            folders.remove(stage)
    log.info(f"wrote {final}: {len(described)} parameters")
    return final


def _refuse_other_models(source: CheckpointSource, names: Iterable[str]) -> None:
    """Raise CheckpointError unless the model is a dense GPT or BERT, whose splits names give."""
    unknown = [name for name in names if not _is_of_gpt(name)]
    if unknown:
        raise CheckpointError(
            "the universal layout can be written of a dense GPT or BERT alone",
            found=f"{source.directory} with {', '.join(unknown[:5])}",
            fix="convert it to another format",
        )


def _is_of_gpt(name: str) -> bool:
    if name.rpartition(".")[0].endswith("_norm"):
        return True
    try:
        megatron_name(name)
    except KeyError:
        return False
    return True


def _written_kinds(source: CheckpointSource, *, optimizer: bool) -> dict[str, dict[str, str]]:
    """Return the name of the tensor for each parameter and kind of file."""
    found: dict[str, dict[str, str]] = {}
    for name in source.tensors:
        space, _, rest = name.partition("/")
        if space == "model":
            found.setdefault(rest, {}).setdefault(_FP32, name)
        elif space == "optimizer":
            kind, ours = rest.split("/", 1)
            if kind == "master":
                found.setdefault(ours, {})[_FP32] = name
            elif optimizer:
                found.setdefault(ours, {})[kind] = name
    return found


def _write_parameters(
    source: CheckpointSource,
    zero: Path,
    described: Mapping[str, Mapping[str, str]],
    options: WriteOptions,
) -> dict[str, KnownParameter]:
    gated = is_gated(source.config)
    optimizer: Mapping[str, Any] = object_at(source.scalars, "optimizer")
    parameters = {}
    for name, kinds in described.items():
        shape = source.tensors[kinds[_FP32]].global_shape
        known = KnownParameter(name, partition_of_name(name, gated=gated), shape=shape)
        parameters[name] = known
        (zero / name).mkdir()
        for kind, tensor in kinds.items():
            values = source.read(tensor, whole(shape)).float()
            if has_vocabulary_rows(name):
                values = _padded(values, options.make_vocab_size_divisible_by)
            _save(zero / name / f"{kind}.pt", {"param": values, **_partition_fields(known)})
        if "steps" in optimizer and len(kinds) > 1:
            _save(zero / name / f"{_STEP}.pt", torch.tensor(float(optimizer["steps"])))
        atomic.sync_directory(zero / name)
    return parameters


def _padded(table: Tensor, multiple: int) -> Tensor:
    """Return the table padded with zero rows to a multiple, as without tensor parallelism.

    DeepSpeed's loader adds rows at stages 1 and 2; at stage 3 a table of another length silently
    shifts every parameter that comes after it.
    """
    sides = (0, 0) * (table.dim() - 1)
    return torch.nn.functional.pad(table, (*sides, 0, -len(table) % multiple))


def _partition_fields(known: KnownParameter) -> dict[str, Any]:
    """Return the fields by which DeepSpeed's loader splits a parameter over tp ranks."""
    fields: dict[str, Any] = {}
    if known.partition is not None:
        fields["cat_dim"] = known.partition.dim
        if known.partition.blocks > 1:
            fields["param_n_sub_params"] = known.partition.blocks
    if has_vocabulary_rows(known.name):
        fields["vocab_tensor"] = True
    return fields


def _write_counters(
    source: CheckpointSource,
    stage: Path,
    parameters: Mapping[str, KnownParameter],
    iteration: int,
    options: WriteOptions,
) -> None:
    """Write the files that loaders of every ZeRO stage read before the tensors."""
    scalars = dict(source.scalars) if options.optimizer else {}
    optimizer: Mapping[str, Any] = object_at(scalars, "optimizer")
    steps = float(optimizer.get("steps", 0))
    progress = completed_progress(source, iteration)
    record = RunRecord(
        iteration=iteration,
        layout=GridLayout(tp=1, pp=1, dp=1),
        progress=progress,
        config={name: dict(group) for name, group in source.config.items()},
        scalars=scalars,
        parameters=parameters,
    )
    codes = {d.dtype_code for n, d in source.tensors.items() if n.startswith("model/")}
    counters: dict[str, Any] = {
        "module": {},
        "optimizer": None,
        "lr_scheduler": None,
        "buffer_names": [],
        "iteration": iteration,
        "global_steps": iteration,
        "global_samples": progress["consumed_samples"],
        "skipped_steps": progress["skipped_iterations"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _DEEPSPEED_VERSION,
        "ds_config": {
            "bf16": {"enabled": codes == {"BF16"}},
            "fp16": {"enabled": codes == {"F16"}},
        },
        UNIVERSAL_INFO: universal_info(parameters),
        RECORD: record.to_plain(),
    }
    for prefix in ("", "zero_pp_rank_0_"):  # stages below 3, and stage 3
        _save(stage / f"{prefix}mp_rank_00_model_states.pt", counters)
    groups: list[dict[str, Any]] = [{} for _ in range(_EMPTY_GROUPS)]
    state = {
        "ds_version": _DEEPSPEED_VERSION,
        "overflow": False,
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(steps)}},
            "param_groups": groups,
        },
        "written_by": f"megatron-verified {megatron.__version__}",
    }
    _save(stage / "zero" / "optimizer_state.pt", state)
    atomic.sync_directory(stage / "zero")
    atomic.sync_directory(stage)


def _save(path: Path, content: Any) -> None:
    """Write with torch.save, durably, and read the checksums back."""
    torch_file.save(path, content)
    unpickle.check(path)


def _files_of(path: Path) -> dict[str, Path]:
    files = {file.stem: file for file in sorted(path.iterdir()) if file.suffix == ".pt"}
    if _FP32 not in files:
        raise _damaged(path, f"no {_FP32}.pt beside {', '.join(files) or 'nothing'}")
    return {_FP32: files.pop(_FP32), **files}


def _tensor_parallel_size(state: Mapping[str, Any], facts: FolderFacts) -> int:
    """Return how many parts were joined; 1 where that is not recorded."""
    if facts.grid is not None:
        return facts.grid[0]
    dimensions = state.get("checkpoint_parallel_dimensions")
    if isinstance(dimensions, Mapping):
        return int(dimensions["tp_degree"])
    args = state.get("args")
    return int(getattr(args, "tensor_model_parallel_size", 1) or 1)


def _in_parts(fields: Mapping[str, Any]) -> bool:
    """Return whether the converter joined the parameter's sub-parameters separately."""
    return int(fields.get("param_n_sub_params", 1)) > 1 or "sub_param_shape" in fields


def _unflattened(values: Tensor, shape: tuple[int, ...], path: Path, tp: int) -> Tensor:
    """Return the flat tensor of ZeRO-3's shares in the parameter's shape."""
    if values.dim() != 1 or values.numel() != math.prod(shape):
        if tp > 1 or values.dim() > 1:  # joined over ranks, so no longer of one rank's shape
            return values
        raise _damaged(path, f"{values.numel()} elements for a parameter of {shape}")
    return values.view(shape)


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "a universal checkpoint does not hold what it should",
        found=f"{path}: {found}",
        fix="convert it again from the checkpoint that DeepSpeed wrote",
    )
