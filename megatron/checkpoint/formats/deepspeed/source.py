"""DeepSpeed's own layout (`global_stepN`) as a source: any ZeRO stage, any grid, pipelines too.

Written by this program, or by a Megatron-DeepSpeed with its names. No DeepSpeed is needed, and no
code of the files runs. Each whole tensor is put together from the parts of the tensor-parallel
ranks, and each part from the shares of the replicas.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box, from_slices, overlap, whole
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.safetensors_io import dtype_code_of, dtype_of
from megatron.checkpoint.folder import seal
from megatron.checkpoint.formats.deepspeed import files as deepspeed_files
from megatron.checkpoint.formats.deepspeed.facts import FactsSource, FolderFacts, scaler_fields
from megatron.checkpoint.formats.deepspeed.files import DeepSpeedFolder, grid_of
from megatron.checkpoint.formats.deepspeed.parameters import RECORD, KnownParameter
from megatron.checkpoint.formats.deepspeed.shards import (
    MASTER,
    WEIGHT,
    RankState,
    RankTensors,
    missing_elements,
    rank_state,
    shape_of_shares,
)
from megatron.checkpoint.formats.megatron.names import is_parameter
from megatron.checkpoint.source import SourceOptions, TensorDescription
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject
from megatron.mpu import partition as partitions

T = TypeVar("T")
_HALF = (torch.bfloat16, torch.float16)
_TIED_PREFIX = "tied_modules."


class _Entry(NamedTuple):
    """One parameter of ours: its name and split, its parts by stage, and its whole shape.

    `padded` is the shape that the parts make up, `shape` the same without padding rows.
    """

    known: KnownParameter
    stages: Mapping[int, Mapping[int, RankTensors]]  # by pipeline stage, by tensor-parallel rank
    padded: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype  # of training

    @property
    def parts(self) -> Mapping[int, RankTensors]:
        """The parts of the first stage that has it: later copies are unused, or tied to it."""
        return self.stages[min(self.stages)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The optimizer's state for it, under our names."""
        half = self.dtype in _HALF
        kinds = self.parts[0].kinds
        return tuple(k for k in kinds if k != WEIGHT and (half or k != MASTER))


class DeepSpeedSource(FactsSource):
    """A `global_stepN` folder, opened; all files are mapped, and read on demand.

    Raises:
        CheckpointError: files are missing or contradict each other, or the model is unknown.
    """

    format_name = "deepspeed"

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        self.seal = seal.of(directory)
        self._folder = DeepSpeedFolder.of(directory)
        first = first_state(directory)
        self.facts = FolderFacts.of(first, options, directory)
        self.grid = grid_of(self._folder, first, self.facts.grid)
        self._zero3_dtype = training_dtype(first)
        ranks = _open_ranks(self._folder, self.grid, self.facts)
        self._steps = _agreed_steps(ranks)
        self._scaler = next((rank.scaler for rank in ranks.values()), None)
        self._entries = dict(in_model_order(self._merge(ranks)))
        self._described = dict(self._describe())
        self._warned: set[str] = set()
        self.facts.check_shapes(directory, {n: e.shape for n, e in self._entries.items()})

    @property
    def scalars(self) -> JsonObject:
        """The number of updates and the loss scale; empty where no optimizer was saved."""
        if self.facts.record is not None:
            return self.facts.record.scalars
        if not any(name.startswith("optimizer/") for name in self._described):
            return {}
        scaler = scaler_fields(self._scaler)
        return {"optimizer": {"steps": self._steps, "loss_scaler": scaler}}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`, assembled from the parts of all ranks."""
        described = self._described[name]
        space, _, rest = name.partition("/")
        kind, ours = (WEIGHT, rest) if space == "model" else tuple(rest.split("/", 1))
        entry = self._entries[ours]
        if kind == WEIGHT and WEIGHT not in entry.parts[0].kinds:
            kind = MASTER  # ZeRO-3 saves the masters alone; rounded they are the weights
        result = torch.empty(box.shape, dtype=dtype_of(described.dtype_code))
        if self.facts.rows.sums(ours):
            parts = [torch.empty(box.shape, dtype=torch.float32) for _ in range(self.grid.tp)]
            for tp, part in enumerate(parts):
                entry.parts[tp].read_into(part, kind, box, ours)
            return result.copy_(torch.stack(parts).sum(dim=0))
        self._fill(result, entry, kind, box, entry.parts)
        self._compare_copies(result, entry, kind, box)
        return result

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Compare digests in part `share` of `of` parts of the files, or else torch.save's sums."""
        if self.seal is not None:
            seal.check_digests(self.directory, self.seal, share=share, of=of)
            return
        for path in self._folder.files[share::of]:
            unpickle.check(path)

    def _describe(self) -> Iterator[tuple[str, TensorDescription]]:
        for name, entry in self._entries.items():
            yield f"model/{name}", TensorDescription(dtype_code_of(entry.dtype), entry.shape)
        if self.grid.tp > 1 and any(map(self.facts.rows.sums, self._entries)):
            log.warning(
                f"{self.directory}: biases of its parallel branches are the sums of those of "
                f"{self.grid.tp} tensor-parallel ranks, each of which has an optimizer state of "
                "its own: only weights are loaded"
            )
            return
        for name, entry in self._entries.items():
            for kind in entry.kinds:
                code = dtype_code_of(entry.parts[0].kinds[kind][0].values.dtype)
                yield f"optimizer/{kind}/{name}", TensorDescription(code, entry.shape)

    def _merge(self, ranks: Mapping[tuple[int, int], RankState]) -> Iterator[tuple[str, _Entry]]:
        names = {name: None for rank in ranks.values() for name in rank.held}
        known = self.facts.parameters(names)
        stages: dict[str, dict[int, dict[int, RankTensors]]] = {}
        described: dict[str, KnownParameter] = {}
        for (stage, tp), rank in ranks.items():
            for name, held in rank.held.items():
                ours = described.setdefault(known[name].name, known[name]).name
                stages.setdefault(ours, {}).setdefault(stage, {})[tp] = held
        for ours, by_stage in stages.items():
            parts = by_stage[min(by_stage)]
            self._check_parts(ours, parts)
            padded = partitions.global_shape(
                parts[0].shape, described[ours].partition, self.grid.tp
            )
            weights = parts[0].kinds.get(WEIGHT)
            dtype = self._zero3_dtype if weights is None else weights[0].values.dtype
            shape = _true_shape(padded, described[ours])
            yield ours, _Entry(described[ours], by_stage, padded, shape, dtype)

    def _check_parts(self, name: str, parts: Mapping[int, RankTensors]) -> None:
        """Check that every rank holds the same kinds and shape, and all of its elements."""
        first = parts.get(0)
        faults = []
        if first is None or len(parts) != self.grid.tp:
            faults.append(f"{len(parts)} of {self.grid.tp} tensor-parallel ranks have it")
        elif len({(part.shape, frozenset(part.kinds)) for part in parts.values()}) > 1:
            faults.append("ranks hold other shapes or other state")
        for part in parts.values():
            faults += [
                f"{left} elements of its {kind} are nowhere"
                for kind in part.kinds
                if (left := missing_elements(part, kind))
            ]
            if not part.kinds:
                faults.append("there is no value of it")
        if faults:
            raise CheckpointError(
                "the files of a DeepSpeed checkpoint do not make a parameter up",
                found=f"{name}: {faults[0]}",
                fix="copy the folder again, from every node that wrote to it, or load another one",
            )

    def _fill(
        self, result: Tensor, entry: _Entry, kind: str, box: Box, parts: Mapping[int, RankTensors]
    ) -> None:
        partition = entry.known.partition
        ranks = range(self.grid.tp) if partition is not None else range(1)
        for tp in ranks:
            pieces = partitions.pieces(entry.padded, partition, tp, self.grid.tp)
            moved: Tensor | None = None
            for piece in pieces:
                local_box, global_box = from_slices(piece.local), from_slices(piece.global_)
                common = overlap(global_box, box) if box.shape else global_box
                if common is None:
                    continue
                wanted = common.within(global_box).moved(local_box.offset)
                target = result[common.within(box).slices]
                if self.facts.rows.moves(entry.known.name):
                    if moved is None:
                        moved = self._reordered(entry, kind, parts[tp], result.dtype)
                    target.copy_(moved[wanted.slices])
                else:
                    parts[tp].read_into(target, kind, wanted, entry.known.name)

    def _reordered(self, entry: _Entry, kind: str, part: RankTensors, dtype: torch.dtype) -> Tensor:
        """Return one rank's whole part with its rows in our order."""
        local = torch.empty(part.shape, dtype=dtype)
        part.read_into(local, kind, whole(part.shape), entry.known.name)
        return self.facts.rows.to_ours(entry.known.name, local)

    def _compare_copies(self, values: Tensor, entry: _Entry, kind: str, box: Box) -> None:
        """Compare tied weights over stages; warn if replicated ones differ over tp ranks."""
        name, first = entry.known.name, min(entry.stages)
        for stage, parts in entry.stages.items():
            if stage == first or not entry.known.tied or kind not in parts[0].kinds:
                continue
            other = torch.empty_like(values)
            self._fill(other, entry, kind, box, parts)
            if not torch.equal(values, other):
                raise CheckpointError(
                    "copies of a tied weight differ in a DeepSpeed checkpoint",
                    found=f"{name} ({kind}) on pipeline stages {first} and {stage}",
                    fix="the training that wrote it has gone wrong: load an older checkpoint",
                )
        if entry.known.partition is not None or name in self._warned:
            return
        for tp in range(1, self.grid.tp):
            other = torch.empty_like(values)
            entry.parts[tp].read_into(other, kind, box, name)
            if not torch.equal(values, other):
                self._warned.add(name)
                log.warning(
                    f"{self.directory}: copies of {name} ({kind}) differ between tensor-parallel "
                    f"ranks 0 and {tp}, by up to {float((values - other).abs().max()):.1e}; that "
                    "of rank 0 is taken"
                )
                return


def first_state(directory: Path) -> Mapping[str, Any]:
    """Return the state in the file of the first rank, which describes the whole run."""
    folder = DeepSpeedFolder.of(directory)
    files = folder.model_of_share or folder.model
    if not files:
        raise CheckpointError(
            "a DeepSpeed checkpoint has no model states",
            found=f"no *mp_rank_*_model_states.pt in {directory}",
            fix="copy the folder again, from every node that wrote to it, or load another one",
        )
    state = deepspeed_files.load(files[min(files)])  # type: ignore[index,type-var]
    if not isinstance(state, Mapping):
        raise CheckpointError(
            "a file of a DeepSpeed checkpoint does not hold what it should",
            found=f"{files[min(files)]} holds {type(state).__name__}",  # type: ignore[index,type-var]
            fix="load another checkpoint",
        )
    return state


def training_dtype(state: Mapping[str, Any]) -> torch.dtype:
    """Return the training dtype from DeepSpeed's JSON, for files without weights."""
    config = state.get("ds_config")
    settings = config if isinstance(config, Mapping) else {}
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16),
                       ("fp16", torch.float16)):  # fmt: skip
        block = settings.get(key)
        if isinstance(block, Mapping) and block.get("enabled") is True:
            return dtype
    return torch.float32


def _open_ranks(
    folder: DeepSpeedFolder, grid: deepspeed_files.FolderGrid, facts: FolderFacts
) -> dict[tuple[int, int], RankState]:
    """Return the state of every model-parallel rank, by (stage, tensor-parallel rank)."""
    states = {
        (stage, tp): deepspeed_files.load(
            folder.model_of_share[rank, 0] if folder.partitioned else folder.model[rank]
        )
        for stage, tp, rank in grid.ranks()
    }
    listed = {place: _listed_names(state) for place, state in states.items()}
    recorded = {} if facts.record is None else facts.record.parameters
    ours = {name: known.name for name, known in recorded.items()}
    layers = {tp: _layer_weights(folder, tp, listed, ours) for tp in range(grid.tp)}
    found = {}
    for stage, tp, rank in grid.ranks():
        state = states[stage, tp]
        if folder.layers:
            weights = layers[tp].get(stage, {})
        else:
            weights = {} if folder.partitioned else _weights(state)
        shares = [
            deepspeed_files.load(folder.shares[rank, dp]) for dp in range(grid.dp) if folder.shares
        ]
        found[stage, tp] = rank_state(state, shares, weights, _order(state))
    return found


def _weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    module, buffers = state.get("module") or {}, set(state.get("buffer_names") or ())
    return {
        name: value
        for name, value in module.items()
        if isinstance(value, Tensor) and name not in buffers and is_parameter(name)
    }


def _listed_names(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of one rank's parameters, if its state lists them."""
    shapes = shape_of_shares(state)
    return tuple(shapes) if shapes else tuple(_order(state))


def _order(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the order of the optimizer, if a run of ours wrote them; else none."""
    record = state.get(RECORD)
    return tuple(record.get("order", ())) if isinstance(record, Mapping) else ()


def _layer_weights(
    folder: DeepSpeedFolder,
    tp: int,
    listed: Mapping[tuple[int, int], tuple[str, ...]],
    ours: Mapping[str, str],
) -> dict[int, dict[str, Tensor]]:
    """Return a pipeline's weights by DeepSpeed's names, under the first stage that lists each.

    A file has the names within its layer; the number, or the key of a tied module, is put before.
    """
    stage_of = {name: stage for (stage, at), names in sorted(listed.items(), reverse=True)
                for name in names if at == tp}  # fmt: skip
    found: dict[int, dict[str, Tensor]] = {}
    for (layer, rank), path in sorted(folder.layers.items()):
        if rank != tp:
            continue
        for inner, value in deepspeed_files.load(path).items():
            if not isinstance(value, Tensor) or not is_parameter(inner):
                continue
            name = _name_in_pipeline(layer, inner, stage_of, ours)
            found.setdefault(stage_of.get(name, 0), {})[name] = value
    return found


def _name_in_pipeline(
    layer: int, inner: str, known: Mapping[str, int], ours: Mapping[str, str]
) -> str:
    numbered = f"{layer}.{inner}"
    if numbered in known:
        return numbered
    tied = [name for name in known if name.startswith(_TIED_PREFIX)]
    for name in tied:
        # A tied module may be the whole layer, or in our runs only its shared part.
        end = f".{inner}" if "." in inner else None  # "weight" alone ends many names
        if name.split(".", 2)[2] == inner or (end and ours.get(name, "").endswith(end)):
            return name
    return numbered


def _agreed_steps(ranks: Mapping[tuple[int, int], RankState]) -> int | None:
    counts = {rank.steps for rank in ranks.values()}
    if len(counts) > 1:
        raise CheckpointError(
            "the files of a DeepSpeed checkpoint are of different steps",
            found=f"optimizers of {sorted(map(str, counts))} steps",
            fix="the folder holds parts of two saves: load another checkpoint",
        )
    return next(iter(counts))


def _true_shape(padded: tuple[int, ...], known: KnownParameter) -> tuple[int, ...]:
    """Return the shape without padding rows.

    A table smaller than expected keeps its shape: the load reports the mismatch.
    """
    if known.shape is None or known.shape[0] > padded[0]:
        return padded
    return known.shape


def in_model_order(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Sort (name, value) pairs: embedding, layers by number, then the rest."""

    def place(item: tuple[str, T]) -> tuple[int, int]:
        first, *rest = item[0].split(".")
        if first == "layers":
            return 1, int(rest[0])
        return (0 if first == "embedding" else 2), 0

    return sorted(entries, key=place)
