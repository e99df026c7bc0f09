"""The steps of a save, and a save that runs them in order while the training waits.

Agree on the plan and the room, write to a stage, agree, manifest, rename, tracker, retention. A
failure on any rank is the same CheckpointError on all, removes the stage and leaves the former
checkpoint as it was. `background` runs the same steps in the background.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

import megatron
from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files import store
from megatron.checkpoint.files.durable import from_os_error
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import GridLayout, Manifest, SavedTensor
from megatron.checkpoint.folder.retention import KEEP_ALL, Retention
from megatron.checkpoint.folder.run_folder import TRACKER, iteration_name
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.sharded import Offer, PieceKey, SharedPlan, WrittenPart
from megatron.checkpoint.sharded import Snapshot
from megatron.errors import CheckpointError, MegatronError
from megatron.json_values import JsonObject
from megatron.mpu.context import ParallelContext
from megatron.ops.library import kernels_in_use

T = TypeVar("T")
NOTHING: Mapping[str, JsonObject] = MappingProxyType({})
_ROOM_BYTES = 1 << 20  # for the manifest's fixed part and the file system's own blocks
_PIECE_BYTES = 256  # of manifest for one piece


class Saved(NamedTuple):
    """A finished save: where, how much, how long, and which older iterations it retired.

    `stalled` are the seconds of `seconds` for which the training stood still.
    """

    iteration: int
    directory: Place
    bytes: int
    seconds: float
    stalled: float
    retired: tuple[int, ...]

    def __str__(self) -> str:
        rate = f"{self.bytes / 2**20:.1f} MiB in {self.seconds:.1f} s"
        if self.stalled < self.seconds:
            rate += f", for {self.stalled:.2f} s of which training stood still"
        return (
            f"successfully saved checkpoint at iteration {self.iteration} to {self.directory} "
            f"({rate})"
        )


class _Facts(NamedTuple):
    """Facts that must be equal on all ranks before they write one checkpoint."""

    iteration: int
    progress: str
    scalars: str


@dataclass(frozen=True, slots=True, eq=False)
class StagedSave:
    """A save in progress after all ranks agreed on its plan. Performs no communication."""

    plan: SharedPlan
    folder: Place
    directory: Place  # the folder of the files before the commit
    iteration: int
    layout: GridLayout
    retention: Retention
    started: float

    def write(self, snapshot: Snapshot, rank: int) -> WrittenPart:
        """Write the part of `rank` durably.

        If an older checkpoint may be deleted because of this one, the part is read back too.
        """
        on_disk = isinstance(self.directory, Path)
        if on_disk and not self.directory.is_dir():
            raise CheckpointError(
                "the folder that rank 0 made for the checkpoint is not there",
                found=str(self.directory),
                fix="--save must be on a file system that all ranks see",
            )
        part = sharded.write(self.directory, snapshot, self.plan, rank=rank)
        if on_disk and self.retention.last is not None:
            verify.read_back(self.directory, part.files)
        return part

    def witnessed(self, snapshot: Snapshot, rank: int) -> dict[PieceKey, str]:
        """Return digests of the pieces that `rank` is the witness of, as it holds them."""
        return sharded.digests(snapshot, frozenset(self.plan.ranks[rank].witnessed))

    def describe(self, snapshot: Snapshot, parts: Sequence[WrittenPart]) -> Manifest:
        """Check on rank 0 that every file exists with its expected size, then write the manifest.

        In an object store this commits the checkpoint.
        """
        content = self._manifest(snapshot, parts)
        damages = verify.wrong_sizes(self.directory, content, content.files)
        if damages:
            raise verify.damage_error(self.directory, damages)
        text = manifest.encode(content)
        manifest.decode(text, self.directory / manifest.NAME)
        store.write_object(self.directory / manifest.NAME, text)
        return content

    def commit(self) -> Place:
        """Make what was described the latest checkpoint."""
        try:
            return folders.commit(self.directory, self.iteration)
        except OSError as error:
            final = self.folder / iteration_name(self.iteration)
            if isinstance(self.directory, Path) and self.directory.exists():
                folders.remove(self.directory)
                raise
            problem = from_os_error(error, "writing the tracker file")
            raise CheckpointError(
                f"the checkpoint of iteration {self.iteration} is whole, but is not named as the "
                "latest",
                found=f"{final}; {problem.problem}; {problem.found}",
                fix=f"echo {self.iteration} > {self.folder / TRACKER}",
            ) from error

    def retire(self) -> tuple[int, ...]:
        """Delete older checkpoints; see the function of this name."""
        return retire_older(self.folder, self.retention, newest=self.iteration)

    def discard(self) -> None:
        """Remove what was written; no rank may still be writing."""
        folders.remove(self.directory)

    def saved(self, directory: Place, size: int, retired: tuple[int, ...]) -> Saved:
        """Return the record of the finished save."""
        seconds = time.monotonic() - self.started
        return Saved(self.iteration, directory, size, seconds, seconds, retired)

    def _manifest(self, snapshot: Snapshot, parts: Sequence[WrittenPart]) -> Manifest:
        return manifest_of(
            snapshot,
            parts,
            iteration=self.iteration,
            layout=self.layout,
            tensors=saved_tensors(self.plan, parts),
        )


def saved_tensors(plan: SharedPlan, parts: Sequence[WrittenPart]) -> dict[str, SavedTensor]:
    """Return the tensors of a plan with the pieces that ranks have written."""
    pieces = {
        name: [p for part in parts for p in part.pieces.get(name, ())] for name in plan.tensors
    }
    return {
        name: SavedTensor(
            known.dtype_code, known.global_shape, tuple(sorted(pieces[name], key=_place))
        )
        for name, known in plan.tensors.items()
    }


def manifest_of(
    snapshot: Snapshot,
    parts: Sequence[WrittenPart],
    *,
    iteration: int,
    layout: GridLayout,
    tensors: Mapping[str, SavedTensor],
    beside: Mapping[str, JsonObject] = NOTHING,
) -> Manifest:
    """Return the manifest of the files of all ranks; `parts` are in rank order.

    Args:
        beside: what is recorded beside the groups of flags.
    """
    return Manifest(
        iteration=iteration,
        layout=layout,
        progress=snapshot.progress,
        scalars=snapshot.scalars,
        config={**snapshot.config, **beside},
        tensors=tensors,
        files={name: record for part in parts for name, record in part.files.items()},
        generators=tuple(part.generators for part in parts if part.generators is not None),
        written_by={
            "megatron": megatron.__version__,
            "torch": torch.__version__,
            "kernels": kernels_in_use(),
            **snapshot.arithmetic,
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        data=snapshot.data,
        validation_loss=snapshot.validation_loss,
        model_kind=snapshot.model_kind,
    )


def _place(piece: manifest.SavedPiece) -> tuple[int, ...]:
    return piece.box.offset


def save_snapshot(
    folder: str | Place,
    snapshot: Snapshot,
    *,
    iteration: int,
    ctx: ParallelContext,
    retention: Retention = KEEP_ALL,
) -> Saved:
    """Write `snapshot` as the checkpoint of `iteration` in `folder`, and make it the latest.

    All ranks call this together; `folder` is on a file system, or a store of objects, that all of
    them see. On return the checkpoint is durable.

    Raises:
        CheckpointError: the same on every rank. The former checkpoint is as it was, and no part
            of this one is left, unless the message says that only the tracker is missing.
        NumericsError: the same on every rank: what several ranks hold differs between two of them.
            No part of this checkpoint is left.
    """
    stage = prepare_save(
        folder,
        snapshot,
        iteration=iteration,
        ctx=ctx,
        retention=retention,
    )
    try:

        def write() -> WrittenPart:
            part = stage.write(snapshot, ctx.rank)
            return part._replace(digests=stage.witnessed(snapshot, ctx.rank))

        parts = run_on_all_ranks(ctx, writing(iteration), write)
        sharded.check_replicas(parts)  # after the writing, which is when memory has to be right
        size = run_on_rank0(
            ctx,
            "checking and describing the checkpoint",
            lambda: stage.describe(snapshot, parts).bytes,
        )
    except MegatronError:  # the same on all ranks, so none is still writing
        run_on_rank0(ctx, "removing what was written", stage.discard)
        raise
    directory = run_on_rank0(ctx, "putting the checkpoint in place", stage.commit)
    retired = run_on_rank0(ctx, "removing older checkpoints", stage.retire)
    return stage.saved(directory, size, retired)


def share_of(snapshot: Snapshot, *, ctx: ParallelContext) -> Snapshot:
    """Return the part of such a snapshot that this rank would write; all ranks call this together.

    Raises:
        CheckpointError: ranks disagree about the tensors. The same on every rank.
    """
    return sharded.share(snapshot, planned(snapshot, ctx=ctx), rank=ctx.rank)


def planned(snapshot: Snapshot, *, ctx: ParallelContext) -> SharedPlan:
    """Return who would write what of such a snapshot, and which pieces several ranks hold.

    Raises:
        CheckpointError: ranks disagree about the tensors. The same on every rank.
    """
    offers = run_on_all_ranks(
        ctx, "describing what will be saved", lambda: sharded.describe(snapshot)
    )
    return sharded.plan_write(offers)


def writing(iteration: int) -> str:
    """Return the description of the write step, for messages."""
    return f"writing the checkpoint of iteration {iteration}"


def retire_older(folder: Place, retention: Retention, *, newest: int) -> tuple[int, ...]:
    """Delete what the checkpoint of `newest` makes redundant.

    That one is already safe, so failures to delete others are only logged.
    """
    if retention.last is None:
        return ()
    try:
        return tuple(folders.retire(folder, retention, newest=newest))
    except OSError as error:
        log.warning(f"older checkpoints in {folder} could not be removed: {error}")
        return ()


def run_on_rank0(ctx: ParallelContext, doing: str, step: Callable[[], T]) -> T:
    """Call `step` on rank 0 only; return its result, or raise its error, on all ranks."""
    results = run_on_all_ranks(ctx, doing, lambda: [step()] if ctx.world.is_first else [])
    return results[0][0]


def prepare_save(
    folder: str | Place,
    snapshot: Snapshot,
    *,
    iteration: int,
    ctx: ParallelContext,
    retention: Retention = KEEP_ALL,
) -> StagedSave:
    """Agree on which rank writes what, and reserve space; all ranks call this together.

    Raises:
        CheckpointError: the same on every rank; nothing is left behind.
    """
    started = time.monotonic()
    plan = _agree_on_plan(snapshot, iteration, ctx)
    pieces = sum(len(name) + _PIECE_BYTES for name in plan.tensors) * len(plan.ranks)
    needed = sum(part.bytes for part in plan.ranks) + pieces + _ROOM_BYTES
    where: list[Place] = []

    def locate() -> None:
        where.append(store.place(folder))

    def make() -> folders.StageName:
        root = where[0]
        folders.begin(root)
        folders.require_space(root, needed)
        return folders.stage_name(folders.make_stage(root, iteration))

    run_on_all_ranks(ctx, "looking for the folder to save in", locate)
    stage = run_on_rank0(ctx, "making room for the checkpoint", make)
    return StagedSave(
        plan=plan,
        folder=where[0],
        directory=folders.stage_called(where[0], stage),
        iteration=iteration,
        layout=GridLayout.of(ctx.topology),
        retention=retention,
        started=started,
    )


def _agree_on_plan(snapshot: Snapshot, iteration: int, ctx: ParallelContext) -> SharedPlan:
    def offer() -> tuple[_Facts, Offer]:
        facts = _Facts(iteration, _digest(snapshot.progress), _digest(snapshot.scalars))
        return facts, sharded.describe(snapshot)

    offers = run_on_all_ranks(ctx, "describing what to save", offer)
    first = offers[0][0]
    for rank, (facts, _) in enumerate(offers):
        unequal = [name for name, a, b in zip(_Facts._fields, first, facts) if a != b]
        if unequal:
            raise CheckpointError(
                "ranks are not at the same point of the run, so their parts do not fit together",
                found=f"{', '.join(unequal)} of rank {rank} differ from those of rank 0",
                fix="this is a defect or a rank that runs other code: compare their versions",
            )
    return sharded.plan_write([offer for _, offer in offers])


def _digest(values: JsonObject) -> str:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
