"""Our own format: one safetensors file per rank, each piece of each tensor in exactly one.

Where several ranks hold the same piece (data-parallel replicas, norms under tensor parallelism,
tied embeddings) one of them writes it, chosen so that all write about the same number of bytes,
and another one is its witness: its digest has to be that of what was written, because a bit that
flips in the writer's memory would be stored with a digest that fits.
Tensors carry global names, so any layout loads any other. Plans, writes and reads the bytes of one
rank; does not communicate, commit or decide what to load.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoint import reshard
from megatron.checkpoint.boxes import Box, tiling_fault
from megatron.checkpoint.files import safetensors_header, safetensors_io
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES, Entry
from megatron.checkpoint.files.store import Place, name_of_part
from megatron.checkpoint.files.threads import in_threads
from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder.manifest import FileRecord, Manifest, SavedPiece, entry_name
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot, by_name
from megatron.checkpoint.source import TensorDescription
from megatron.errors import CheckpointError, NumericsError

NAME = "sharded"  # of the format
_ENTRY_BYTES = 256  # of header for one tensor, beside its name
_SHOWN = 5  # pieces in a message
_VALUES = "values"  # the metadata key that holds the JSON part of the random states


class WritePlan(NamedTuple):
    """The pieces that one rank will write, an upper bound of their bytes, and those it witnesses.

    A piece that several ranks hold has one witness, which is not its writer.
    """

    bytes: int
    work: Sequence["PieceKey"]
    witnessed: Sequence["PieceKey"]


class SharedPlan(NamedTuple):
    """Which rank writes what, the same on every rank; `tensors` are in the manifest's order."""

    ranks: Sequence[WritePlan]
    tensors: Mapping[str, TensorDescription]

    @property
    def replicated(self) -> frozenset["PieceKey"]:
        """The pieces that several ranks hold."""
        return frozenset(key for rank in self.ranks for key in rank.witnessed)


class WrittenPart(NamedTuple):
    """The files that one rank has written, and the pieces of tensors in them, by name.

    `digests` are of pieces as this rank holds them, to be compared with those of other ranks.
    """

    files: Mapping[str, FileRecord]
    pieces: Mapping[str, tuple[SavedPiece, ...]]
    generators: str | None
    digests: Mapping["PieceKey", str] = MappingProxyType({})


class ReadPlan(NamedTuple):
    """The `files` that one rank will read, and the call that fills the targets, in threads."""

    files: frozenset[str]
    fill: Callable[[int], None]


class Offer(NamedTuple):
    """The names, shapes, boxes and sizes of one rank's tensors, without values."""

    tensors: tuple[tuple[str, TensorDescription, tuple[Box, ...]], ...]
    generator_bytes: int


class PieceKey(NamedTuple):
    """A piece by its tensor and box; replicas on several ranks have the same key."""

    name: str
    box: Box


class _Step(NamedTuple):
    """One copy: `box` of the stored `entry` of `file` goes into `view`."""

    file: str
    entry: str
    shape: tuple[int, ...]
    dtype_code: str
    box: Box
    view: Tensor


def describe(snapshot: Snapshot) -> Offer:
    """Return this rank's tensors by name, shape and boxes, and the size of its random states."""
    tensors = tuple(
        (name, TensorDescription(t.dtype_code, t.global_shape), t.boxes)
        for name, t in snapshot.by_name().items()
    )
    states = snapshot.generators
    return Offer(tensors, 0 if states is None else _generator_bytes(states))


def plan_write(offers: Sequence[Offer]) -> SharedPlan:
    """Assign every distinct piece to one of the ranks that hold it.

    Raises:
        CheckpointError: ranks disagree about a tensor, or together do not hold all of one.
    """
    described: dict[str, TensorDescription] = {}
    holders: dict[PieceKey, list[int]] = {}
    for rank, offer in enumerate(offers):
        for name, description, boxes in offer.tensors:
            if described.setdefault(name, description) != description:
                raise _disagreement(name, described[name], description, rank)
            for box in boxes:
                holders.setdefault(PieceKey(name, box), []).append(rank)
    _check_whole(described, holders)
    if len({offer.generator_bytes > 0 for offer in offers}) > 1:
        raise CheckpointError(
            "some ranks hand over random states and others do not",
            found=f"{sum(offer.generator_bytes > 0 for offer in offers)} of {len(offers)} do",
            fix="start all ranks with the same flags and the same code",
        )
    keys = list(holders)
    sizes = [ITEM_BYTES[described[key.name].dtype_code] * key.box.size for key in keys]
    writers = assign_writers(sizes, [holders[key] for key in keys])
    work: list[list[PieceKey]] = [[] for _ in offers]
    witnessed: list[list[PieceKey]] = [[] for _ in offers]
    total = [offer.generator_bytes for offer in offers]
    for key, size, writer in zip(keys, sizes, writers):
        work[writer].append(key)
        total[writer] += size + len(key.name) + _ENTRY_BYTES
    replicated = [at for at, key in enumerate(keys) if len(holders[key]) > 1]
    others = [[rank for rank in holders[keys[at]] if rank != writers[at]] for at in replicated]
    for at, witness in zip(replicated, assign_writers([sizes[at] for at in replicated], others)):
        witnessed[witness].append(keys[at])
    return SharedPlan([WritePlan(*each) for each in zip(total, work, witnessed)], described)


def plan_alone(snapshot: Snapshot) -> SharedPlan:
    """Return the plan of a rank that writes all that it holds, as rank 0 of one."""
    offer = describe(snapshot)
    keys = [PieceKey(name, box) for name, _, boxes in offer.tensors for box in boxes]
    described = {name: description for name, description, _ in offer.tensors}
    size = sum(ITEM_BYTES[described[k.name].dtype_code] * k.box.size for k in keys)
    return SharedPlan([WritePlan(size + offer.generator_bytes, keys, ())], described)


def digests(snapshot: Snapshot, keys: Collection[PieceKey]) -> dict[PieceKey, str]:
    """Return digests of those of the pieces `keys` that this rank holds."""
    views = {key: view for key, view in _views(snapshot).items() if key in keys}
    return dict(zip(views, safetensors_io.digests_of(views.values())))


def check_replicas(parts: Sequence[WrittenPart]) -> None:
    """Compare what all ranks have written, and hold, of pieces that several ranks hold.

    Raises:
        NumericsError: they differ in some bit, so that one rank's memory, or machine, is wrong.
    """
    found: dict[PieceKey, dict[str, int]] = defaultdict(dict)  # the first rank of each digest
    for rank, part in enumerate(parts):
        for name, pieces in part.pieces.items():
            for piece in pieces:
                found[PieceKey(name, piece.box)].setdefault(piece.xxh3, rank)
        for key, digest in part.digests.items():
            found[key].setdefault(digest, rank)
    compared = {key for part in parts for key in part.digests}
    differing = {key: ranks for key, ranks in found.items() if len(ranks) > 1}
    if differing:
        shown = [
            f"{key.name} on ranks {', '.join(map(str, ranks.values()))}"
            for key, ranks in list(differing.items())[:_SHOWN]
        ]
        raise NumericsError(
            "ranks hold different values of what a checkpoint stores once",
            found=f"{len(differing)} of {len(compared)} pieces: {'; '.join(shown)}",
            fix="resume from the last checkpoint; if it comes back on the same rank, take that "
            "machine out",
        )


def write(directory: Place, snapshot: Snapshot, plan: SharedPlan, *, rank: int) -> WrittenPart:
    """Write this rank's shard and its random states; a rank with no pieces makes no shard."""
    files: dict[str, FileRecord] = {}
    pieces: dict[str, list[SavedPiece]] = defaultdict(list)
    if keys := _alignable(plan.ranks[rank].work, plan.tensors):
        file = f"shard-{rank:05d}-of-{len(plan.ranks):05d}.safetensors"
        file = name_of_part(directory, file)
        views = _views(snapshot)
        named = [
            (entry_name(key.name, key.box, plan.tensors[key.name].global_shape), views[key])
            for key in keys
        ]
        written = safetensors_io.write(directory / file, named)
        files[file] = FileRecord(written.bytes, written.xxh3)
        for key, digest in zip(keys, written.tensors_xxh3):
            pieces[key.name].append(SavedPiece(file, key.box, digest))
    generators = None
    if snapshot.generators is not None:
        generators = name_of_part(directory, f"generators-{rank:05d}.safetensors")
        files[generators] = write_generators(directory / generators, snapshot.generators)
    return WrittenPart(files, {n: tuple(p) for n, p in pieces.items()}, generators)


def _views(snapshot: Snapshot) -> dict[PieceKey, Tensor]:
    return {
        PieceKey(tensor.name, part.box): part.view
        for tensor in snapshot.tensors
        for part in tensor.parts
    }


def share(snapshot: Snapshot, plan: SharedPlan, *, rank: int) -> Snapshot:
    """Return the pieces that this rank writes."""
    own_pieces = set(plan.ranks[rank].work)
    tensors = []
    for tensor in snapshot.tensors:
        parts = tuple(
            part for part in tensor.parts if PieceKey(tensor.name, part.box) in own_pieces
        )
        if parts:
            tensors.append(replace(tensor, parts=parts, padding=()))
    return replace(snapshot, tensors=tuple(tensors))


def plan_read(
    directory: Place, manifest: Manifest, wanted: Iterable[ShardedTensor], *, cast: bool
) -> ReadPlan:
    """Match names, shapes and dtypes, and find the bytes; reads nothing.

    Raises:
        CheckpointError: lists what does not match; or pieces do not make up a tensor.
    """
    targets = by_name(list(wanted))
    if problems := reshard.mismatches(manifest.tensors, targets, cast=cast):
        raise reshard.mismatch_error(problems)
    steps: dict[str, list[_Step]] = defaultdict(list)
    for name, target in targets.items():
        saved = manifest.tensors[name]
        for copy in reshard.plan(name, saved.boxes, target.boxes):
            piece, part = saved.pieces[copy.saved], target.parts[copy.wanted]
            step = _Step(
                file=piece.file,
                entry=entry_name(name, piece.box, saved.global_shape),
                shape=piece.box.shape,
                dtype_code=saved.dtype_code,
                box=copy.box.within(piece.box),
                view=part.view[copy.box.within(part.box).slices],
            )
            steps[piece.file].append(step)

    def fill(threads: int) -> None:
        for file, of_file in steps.items():
            _read_file(directory / file, of_file, threads)
        for target in targets.values():
            target.zero_padding()

    return ReadPlan(frozenset(steps), fill)


def range_of(directory: Place, manifest: Manifest, name: str) -> TensorRange | None:
    """Return where a whole tensor lies; None where it is not together in one file on a disk.

    Raises:
        CheckpointError: the file does not hold what the manifest says.
    """
    saved = manifest.tensors[name]
    files = {piece.file for piece in saved.pieces}
    if len(files) != 1 or not isinstance(directory, Path):
        return None
    path = directory / files.pop()
    entries = safetensors_header.read(path).entries
    start = stop = -1
    rows = 0
    for piece in sorted(saved.pieces, key=lambda piece: piece.box.offset):
        label = entry_name(name, piece.box, saved.global_shape)
        entry, expected = entries.get(label), (saved.dtype_code, piece.box.shape)
        if entry is None or (entry.dtype, entry.shape) != expected:
            raise _other_entry(path, label, entry, expected)
        # The two halves of a gated matrix are pieces of their own, one after the other.
        follows = stop in (-1, entry.start) and piece.box.offset[:1] in ((), (rows,))
        if not follows or piece.box.shape[1:] != saved.global_shape[1:]:
            return None
        start, stop = entry.start if stop == -1 else start, entry.stop
        rows += piece.box.shape[0] if piece.box.shape else 0
    return TensorRange(path, start, stop, saved.dtype_code, saved.global_shape)


def read_generators(directory: Place, manifest: Manifest, rank: int) -> GeneratorStates:
    """Return the random states that rank `rank` saved."""
    with safetensors_io.Reader(directory / manifest.generators[rank]) as reader:
        tensors = {name: reader.tensor(name) for name in reader.header.entries}
        return GeneratorStates(tensors, json.loads(reader.header.metadata[_VALUES]))


def recognise(directory: Place) -> bool:
    """Return whether a manifest of ours exists, intact or damaged."""
    return (directory / manifests.NAME).is_file()


def assign_writers(sizes: Sequence[int], holders: Sequence[Sequence[int]]) -> list[int]:
    """Return one of `holders[i]` for each piece i of `sizes[i]` bytes, so that loads are even.

    Largest first, each to the least loaded of its holders (Graham 1969, LPT), ties to the lowest
    rank: the same on every rank.
    """
    loads: dict[int, int] = defaultdict(int)
    writers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writers[i] = min(holders[i], key=lambda rank: (loads[rank], rank))
        loads[writers[i]] += sizes[i]
    return writers


def _check_whole(
    described: Mapping[str, TensorDescription], holders: Mapping[PieceKey, list[int]]
) -> None:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for key in holders:
        boxes[key.name].append(key.box)
    for name, description in described.items():
        fault = tiling_fault(boxes[name], description.global_shape)
        if fault is not None:
            raise CheckpointError(
                "the ranks together do not hold a whole tensor to save",
                found=f"{name}: {fault}",
                fix="this is a defect of how the tensor was described: report it",
            )


def _disagreement(
    name: str, first: TensorDescription, other: TensorDescription, rank: int
) -> CheckpointError:
    return CheckpointError(
        "ranks disagree about a tensor to save",
        found=f"{name}: {first.dtype_code} {list(first.global_shape)} elsewhere, "
        f"{other.dtype_code} {list(other.global_shape)} on rank {rank}",
        fix="start all ranks with the same flags and the same code",
    )


def _alignable(
    keys: Iterable[PieceKey], tensors: Mapping[str, TensorDescription]
) -> list[PieceKey]:
    """Sort by element size, largest first, so that every tensor is aligned to it."""
    return sorted(keys, key=lambda key: -ITEM_BYTES[tensors[key.name].dtype_code])


def _read_file(path: Place, steps: Sequence[_Step], threads: int) -> None:
    with safetensors_io.Reader(path) as reader:
        for step in steps:
            entry = reader.header.entries.get(step.entry)
            if entry is None or (entry.dtype, entry.shape) != (step.dtype_code, step.shape):
                raise _other_entry(path, step.entry, entry, (step.dtype_code, step.shape))
        as_they_lie = sorted(steps, key=lambda step: reader.header.entries[step.entry].start)
        in_threads(lambda s: reader.read_into(s.entry, s.box, s.view), as_they_lie, threads)


def _other_entry(
    path: Place, name: str, entry: Entry | None, expected: tuple[str, tuple[int, ...]]
) -> CheckpointError:
    return CheckpointError(
        "a checkpoint file does not hold what the manifest says",
        found=f"{path}: {name} is {entry and (entry.dtype, entry.shape)}, expected {expected}",
        fix="the checkpoint is damaged: load an older iteration",
    )


def write_generators(path: Place, states: GeneratorStates) -> FileRecord:
    """Write one rank's random states as a file of their own, durably."""
    tensors = sorted(states.tensors.items(), key=lambda item: -item[1].element_size())
    written = safetensors_io.write(path, tensors, metadata={_VALUES: _json(states.values)})
    return FileRecord(written.bytes, written.xxh3)


def _generator_bytes(states: GeneratorStates) -> int:
    data = sum(t.element_size() * math.prod(t.shape) for t in states.tensors.values())
    return data + 2 * len(_json(states.values)) + _ENTRY_BYTES * (1 + len(states.tensors))


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            "a random state cannot be written to a checkpoint",
            found=str(error),
            fix="keep random states to tensors and plain JSON values",
        ) from error
