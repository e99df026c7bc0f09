"""Saving and opening checkpoints by all ranks together: one verdict before anything is final.

Save: agree on the plan and the room, write to a stage folder, agree, manifest, rename, tracker. A
failure on any rank is the same CheckpointError on all, removes the stage and leaves the former
checkpoint as it was. Load: agree on which checkpoint, check lengths and digests, agree, and only
then touch a tensor. What to save or load, and when, is the program's policy, not ours.
"""

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import megatron
from megatron import log
from megatron.checkpoint import folder as folders
from megatron.checkpoint import formats, manifest, reshard, verify
from megatron.checkpoint.agreement import together
from megatron.checkpoint.durable import from_os_error, write_file
from megatron.checkpoint.folder import (
    TRACKER,
    iteration_name,
    latest_iteration,
    never_held_a_checkpoint,
    probe_writable,
)
from megatron.checkpoint.formats.base import CheckpointFormat, ReadPlan, SharedPlan, WrittenPart
from megatron.checkpoint.manifest import Layout, Manifest, SavedTensor
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot
from megatron.errors import CheckpointError, MegatronError
from megatron.mpu.context import ParallelContext

__all__ = [
    "TRACKER",
    "OpenCheckpoint",
    "Saved",
    "Verification",
    "iteration_name",
    "latest_iteration",
    "never_held_a_checkpoint",
    "open_checkpoint",
    "probe_writable",
    "save",
]

Verification = Literal["full", "sizes"]
_ROOM_BYTES = 1 << 20  # for the manifest's fixed part and the file system's own blocks
_PIECE_BYTES = 256  # of manifest for one piece
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells containers called "localhost" apart


class Saved(NamedTuple):
    """A finished save: where, how much, how long, and which older iterations it retired."""

    directory: Path
    bytes: int
    seconds: float
    retired: tuple[int, ...]


class _Facts(NamedTuple):
    """What must be equal on all ranks before they write one checkpoint."""

    iteration: int
    progress: str
    scalars: str


def save(
    folder: str | Path,
    snapshot: Snapshot,
    *,
    iteration: int,
    ctx: ParallelContext,
    keep_last: int | None = None,
    format_name: str = "sharded",
) -> Saved:
    """Write `snapshot` as the checkpoint of `iteration` in `folder`, and make it the latest.

    All ranks call this together; `folder` is on a file system that all of them see. On return the
    checkpoint is durable. `keep_last` whole checkpoints up to this one are kept (None: all).

    Raises:
        CheckpointError: the same on every rank. The former checkpoint is as it was, and no part
            of this one is left, unless the message says that only the tracker is missing.
    """
    started = time.monotonic()
    folder = Path(folder)
    form = formats.get(format_name)
    plan = _agree_on_plan(form, snapshot, iteration, ctx)
    stage = folder / _prepare_stage(folder, iteration, plan, ctx)
    try:
        parts = together(
            ctx,
            f"writing the checkpoint of iteration {iteration}",
            lambda: _write_part(form, stage, snapshot, plan, ctx.rank),
        )
        content = _build_manifest(snapshot, plan, parts, iteration, ctx)
        _on_first(ctx, "checking and describing the checkpoint", lambda: _describe(stage, content))
    except MegatronError:  # the same on all ranks, so nobody is still writing
        _on_first(ctx, "removing what was written", lambda: folders.remove(stage))
        raise
    directory = folder / _on_first(
        ctx, "putting the checkpoint in place", lambda: _commit(stage, iteration)
    )
    retired = _on_first(
        ctx, "removing older checkpoints", lambda: _retire(folder, keep_last, iteration)
    )
    return Saved(directory, content.bytes, time.monotonic() - started, retired)


def _on_first(ctx: ParallelContext, doing: str, step: Callable[[], Any]) -> Any:
    """Take `step` on rank 0 alone; its result, or its error, on all."""
    return together(ctx, doing, lambda: step() if ctx.world.is_first else None)[0]


def _agree_on_plan(
    form: CheckpointFormat, snapshot: Snapshot, iteration: int, ctx: ParallelContext
) -> SharedPlan:
    def offer() -> tuple[_Facts, Any]:
        facts = _Facts(iteration, _digest(snapshot.progress), _digest(snapshot.scalars))
        return facts, form.describe(snapshot)

    offers = together(ctx, "describing what to save", offer)
    first = offers[0][0]
    for rank, (facts, _) in enumerate(offers):
        unequal = [name for name, a, b in zip(_Facts._fields, first, facts) if a != b]
        if unequal:
            raise CheckpointError(
                "ranks are not at the same point of the run, so their parts do not fit together",
                found=f"{', '.join(unequal)} of rank {rank} differ from those of rank 0",
                fix="this is a defect or a rank that runs other code: compare their versions",
            )
    return form.plan_write([offer for _, offer in offers])


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _prepare_stage(folder: Path, iteration: int, plan: SharedPlan, ctx: ParallelContext) -> str:
    pieces = sum(len(name) + _PIECE_BYTES for name in plan.tensors) * len(plan.ranks)
    needed = sum(part.bytes for part in plan.ranks) + pieces + _ROOM_BYTES

    def prepare() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(folder)
        folders.require_space(folder, needed)
        return folders.make_stage(folder, iteration).name

    name: str = _on_first(ctx, "making room for the checkpoint", prepare)
    return name


def _write_part(
    form: CheckpointFormat, stage: Path, snapshot: Snapshot, plan: SharedPlan, rank: int
) -> WrittenPart:
    if not stage.is_dir():
        raise CheckpointError(
            "the folder that rank 0 made for the checkpoint is not there",
            found=str(stage),
            fix="--save must be on a file system that all ranks see",
        )
    return form.write(stage, snapshot, plan, rank=rank)


def _build_manifest(
    snapshot: Snapshot,
    plan: SharedPlan,
    parts: list[WrittenPart],
    iteration: int,
    ctx: ParallelContext,
) -> Manifest:
    pieces = {
        name: [p for part in parts for p in part.pieces.get(name, ())] for name in plan.tensors
    }
    tensors = {
        name: SavedTensor(
            known.dtype_code, known.global_shape, tuple(sorted(pieces[name], key=_place))
        )
        for name, known in plan.tensors.items()
    }
    topology = ctx.topology
    return Manifest(
        iteration=iteration,
        layout=Layout(tp=topology.tp, pp=topology.pp, dp=topology.dp),
        progress=snapshot.progress,
        scalars=snapshot.scalars,
        config=snapshot.config,
        tensors=tensors,
        files={name: record for part in parts for name, record in part.files.items()},
        generators=tuple(part.generators for part in parts if part.generators is not None),
        written_by={"megatron": megatron.__version__, "torch": torch.__version__},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        data=snapshot.data,
    )


def _place(piece: manifest.SavedPiece) -> tuple[int, ...]:
    return piece.box.offset


def _describe(stage: Path, content: Manifest) -> None:
    """Rank 0 must see every file at its length; the manifest must read back as it was meant."""
    damages = verify.wrong_sizes(stage, content, content.files)
    if damages:
        raise verify.damage_error(stage, damages)
    text = manifest.encode(content)
    manifest.decode(text, stage / manifest.NAME)
    write_file(stage / manifest.NAME, text)


def _commit(stage: Path, iteration: int) -> str:
    try:
        return folders.commit(stage, iteration).name
    except OSError as error:
        final = stage.parent / iteration_name(iteration)
        if stage.exists():
            folders.remove(stage)
            raise
        problem = from_os_error(error, "writing the tracker file")
        raise CheckpointError(
            f"the checkpoint of iteration {iteration} is whole, but is not named as the latest",
            found=f"{final}; {problem.problem}; {problem.found}",
            fix=f"echo {iteration} > {stage.parent / TRACKER}",
        ) from error


def _retire(folder: Path, keep_last: int | None, iteration: int) -> tuple[int, ...]:
    """The new checkpoint is safe by now, so trouble with the old ones is only said."""
    if keep_last is None:
        return ()
    try:
        return tuple(folders.retire(folder, keep_last, newest=iteration))
    except OSError as error:
        log.warning(f"older checkpoints in {folder} could not be removed: {error}")
        return ()


class _Seen(NamedTuple):
    """What one rank found in the folder."""

    iteration: int
    digest: str
    host: str


def open_checkpoint(
    folder: str | Path,
    iteration: int | None = None,
    *,
    ctx: ParallelContext,
    verification: Verification = "full",
) -> "OpenCheckpoint":
    """The checkpoint of `iteration` in `folder` (None: the latest), the same one on every rank.

    Reads the manifest and checks every file's length; tensors stay untouched. `verification` says
    whether later reads check digests too ("full") or trust the lengths ("sizes").

    Raises:
        CheckpointError: missing, incomplete, damaged, of a newer version, or ranks see different
            checkpoints. The same on every rank.
    """
    folder = Path(folder)

    manifests: list[Manifest] = []

    def look() -> _Seen:
        wanted = latest_iteration(folder) if iteration is None else iteration
        directory = folder / iteration_name(wanted)
        if not directory.is_dir():
            raise folders.missing_iteration(folder, wanted)
        formats.recognise(directory)
        content, digest = manifest.load(directory)
        if content.iteration != wanted:
            raise CheckpointError(
                "a checkpoint lies in the folder of another iteration",
                found=f"{directory} holds iteration {content.iteration}",
                fix=f"rename it to {iteration_name(content.iteration)}",
            )
        manifests.append(content)
        return _Seen(wanted, digest, _host())

    seen = together(ctx, f"opening the checkpoint in {folder}", look)
    for rank, other in enumerate(seen):
        if other[:2] != seen[0][:2]:
            raise CheckpointError(
                "ranks see different checkpoints in the same folder",
                found=f"rank 0: iteration {seen[0].iteration}, manifest {seen[0].digest}; "
                f"rank {rank}: iteration {other.iteration}, manifest {other.digest}; in {folder}",
                fix="put --load on a file system that all ranks see, or copy it to all nodes again",
            )
    opened = OpenCheckpoint(
        directory=folder / iteration_name(seen[0].iteration),
        manifest=manifests[0],
        ctx=ctx,
        verification=verification,
        hosts=tuple(other.host for other in seen),
    )
    together(ctx, f"looking for the files of {opened.directory}", opened.check_sizes)
    _warn_of_newer(folder, seen[0].iteration, iteration)
    return opened


def _warn_of_newer(folder: Path, opened: int, asked: int | None) -> None:
    newer = [i for i in folders.iterations(folder) if i > opened]
    if asked is None and newer:
        log.warning(
            f"{TRACKER} in {folder} names iteration {opened}, but {newer[-1]} is there too: a save "
            f"was cut short before the tracker, or the tracker was set back on purpose"
        )


def _host() -> str:
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint:
    """A checkpoint that all ranks agree on; all call its reading methods together."""

    directory: Path
    manifest: Manifest
    ctx: ParallelContext
    verification: Verification
    hosts: tuple[str, ...] = field(repr=False)
    _checked: set[tuple[str, str]] = field(default_factory=set, repr=False)  # (host, file)

    def check_sizes(self) -> None:
        """Check this rank's share of its host's view of the files; does not communicate.

        Raises:
            CheckpointError: files are missing or of another length.
        """
        here = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.ctx.rank]]
        mine = list(self.manifest.files)[here.index(self.ctx.rank) :: len(here)]
        if damages := verify.wrong_sizes(self.directory, self.manifest, mine):
            raise verify.damage_error(self.directory, damages)

    def read_into(
        self,
        targets: Iterable[ShardedTensor],
        *,
        prefixes: tuple[str, ...] = ("",),
        cast: bool = False,
    ) -> None:
        """Fill this rank's `targets` in place, from whatever layout they were saved at.

        Over all ranks the targets must be exactly the saved tensors under `prefixes` (default:
        all). `cast` permits another dtype than the saved one. Nothing is touched until names,
        shapes and files have been checked on all ranks.

        Raises:
            CheckpointError: names, shapes or dtypes do not match; a file is damaged or cannot be
                read (only then may targets be partly filled). The same on every rank.
        """
        targets = list(targets)
        form = formats.recognise(self.directory)
        plans: list[ReadPlan] = []

        def plan() -> tuple[frozenset[str], frozenset[str]]:
            made = form.plan_read(self.directory, self.manifest, targets, cast=cast)
            plans.append(made)
            return frozenset(target.name for target in targets), made.files

        agreed = together(self.ctx, "matching the checkpoint with this run", plan)
        wanted = frozenset().union(*(names for names, _ in agreed))
        if extra := reshard.unexpected(self.manifest.tensors, wanted, prefixes):
            raise reshard.mismatch_error(extra)
        self._verify([files for _, files in agreed], others=True)
        together(self.ctx, "reading the checkpoint", plans[0].fill)

    def read_generators(self) -> GeneratorStates:
        """This rank's random states; first ask `rng.why_not_restorable` whether they fit.

        Raises:
            CheckpointError: there are none for this rank, or they are damaged.
        """
        saved = self.manifest.generators
        if len(saved) != self.ctx.world.size:
            raise CheckpointError(
                "the checkpoint has no random states for these ranks",
                found=f"{len(saved)} saved, {self.ctx.world.size} ranks; {self.directory}",
                fix="add --no-load-rng to go on with fresh generators",
            )
        form = formats.recognise(self.directory)
        self._verify([{name} for name in saved], others=False)
        states: list[GeneratorStates] = []

        def read() -> None:
            states.append(form.read_generators(self.directory, self.manifest, self.ctx.rank))

        together(self.ctx, "reading the random states", read)
        return states[0]

    def verify_all(self) -> None:
        """Check the digest of every file once, shared out over the ranks.

        Raises:
            CheckpointError: what is damaged.
        """
        self._verify([set() for _ in self.hosts], others=True)

    def _verify(self, needs: Iterable[Any], *, others: bool) -> None:
        """Check digests of the `needs` of each rank, and of files that nobody needs if `others`."""
        if self.verification == "sizes":
            return
        left = [
            {name for name in need if (host, name) not in self._checked}
            for need, host in zip(needs, self.hosts)
        ]
        met = {name for _, name in self._checked}
        sizes = {
            name: record.bytes
            for name, record in self.manifest.files.items()
            if any(name in need for need in left) or (others and name not in met)
        }
        shares = verify.shares(sizes, left, self.hosts)

        def check() -> None:
            mine = shares[self.ctx.rank]
            if damages := verify.wrong_digests(self.directory, self.manifest, mine):
                raise verify.damage_error(self.directory, damages)

        together(self.ctx, "checking the checkpoint's files", check)
        self._checked.update(
            (host, name) for host, names in zip(self.hosts, shares) for name in names
        )
