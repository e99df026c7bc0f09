"""Opens and reads checkpoints of our own format by all ranks together.

The ranks agree on the checkpoint, check lengths and digests, agree on the result, and only then
read tensors, from whatever layout they were saved at. `save_snapshot` is re-exported here; its
steps are in `saving`. The program decides what to save or load, and when.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from megatron import log
from megatron.checkpoint import reshard
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.store import Place, place
from megatron.checkpoint.files.threads import this_host, threads_of_this_rank
from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import GridLayout, Manifest
from megatron.checkpoint.folder.run_folder import (
    TRACKER,
    iteration_name,
    latest_iteration,
    never_held_a_checkpoint,
    probe_writable,
)
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.sharded import ReadPlan
from megatron.checkpoint.save.saving import Saved, run_on_rank0, save_snapshot
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor
from megatron.config.checkpoint import Verification
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext

__all__ = [
    "TRACKER",
    "NativeCheckpoint",
    "Saved",
    "Verification",
    "iteration_name",
    "latest_iteration",
    "never_held_a_checkpoint",
    "open_checkpoint",
    "open_or_previous",
    "probe_writable",
    "save_snapshot",
]


class _RankView(NamedTuple):
    """The checkpoint as one rank sees it."""

    iteration: int
    manifest: str  # its digest
    version: int
    layout: GridLayout
    host: str


def open_checkpoint(
    folder: str | Place,
    iteration: int | None = None,
    *,
    ctx: ParallelContext,
    verification: Verification = Verification.FULL,
) -> "NativeCheckpoint":
    """Return the checkpoint of `iteration` in `folder` (None: the latest), the same on all ranks.

    Reads the manifest and checks every file's length, but no tensor. `verification` selects whether
    later reads check digests too, or only lengths.

    Raises:
        CheckpointError: missing, incomplete, damaged, of a newer version, or ranks see different
            checkpoints. The same on every rank.
    """
    manifests: list[Manifest] = []
    directories: list[Place] = []

    def open_manifest() -> _RankView:
        root = place(folder)
        wanted = latest_iteration(root) if iteration is None else iteration
        directory = root / iteration_name(wanted)
        if not directory.is_dir():
            raise folders.missing_iteration(root, wanted)
        if not sharded.recognise(directory):
            raise manifest.missing(directory)
        content, digest = manifest.load(directory)
        if content.iteration != wanted:
            raise CheckpointError(
                "a checkpoint lies in the folder of another iteration",
                found=f"{directory} holds iteration {content.iteration}",
                fix=f"rename it to {iteration_name(content.iteration)}",
            )
        manifests.append(content)
        directories.append(directory)
        return _RankView(wanted, digest, manifest.VERSION, content.layout, this_host())

    seen = run_on_all_ranks(ctx, f"opening the checkpoint in {folder}", open_manifest)
    for rank, other in enumerate(seen):
        if other[:-1] != seen[0][:-1]:
            names = [n for n, a, b in zip(_RankView._fields[:-1], seen[0], other) if a != b]
            raise CheckpointError(
                "ranks see different checkpoints in the same folder",
                found=f"{', '.join(names)} differ: rank 0 has {_description_of(seen[0])}; "
                f"rank {rank} has {_description_of(other)}; in {folder}",
                fix="put --load on a file system that all ranks see, or copy it to all nodes again",
            )
    opened = NativeCheckpoint(
        directory=directories[0],
        manifest=manifests[0],
        ctx=ctx,
        verification=verification,
        hosts=tuple(other.host for other in seen),
    )
    run_on_all_ranks(ctx, f"looking for the files of {opened.directory}", opened.check_sizes)
    _warn_of_newer(directories[0].parent, seen[0].iteration, iteration)
    return opened


def _description_of(seen: _RankView) -> str:
    return (
        f"iteration {seen.iteration}, manifest {seen.manifest}, version {seen.version}, "
        f"{seen.layout}"
    )


def _warn_of_newer(folder: Place, opened: int, asked: int | None) -> None:
    newer = [i for i in folders.iterations(folder) if i > opened]
    if asked is None and newer:
        log.warning(
            f"{TRACKER} in {folder} names iteration {opened}, but {newer[-1]} is there too: a save "
            f"was cut short before the tracker, or the tracker was set back on purpose"
        )


class Verifiable(Protocol):
    """A checkpoint that can be checked before anything is read."""

    def verify_all(self) -> None:
        """Raise CheckpointError, the same on every rank, where a file is damaged."""


C = TypeVar("C", bound=Verifiable)


def open_or_previous(
    folder: str | Place,
    iteration: int | None,
    open_at: Callable[[int | None], C],
    *,
    ctx: ParallelContext,
) -> C:
    """Return the requested checkpoint or, with a warning, the newest intact one before it.

    Every candidate is verified first. If the tracker is missing or damaged, the newest intact one
    of all is returned. A folder without numbered iterations (a checkpoint's own folder, a release)
    has no fallback.

    Args:
        open_at: opens the checkpoint of an iteration, of whatever format; None: the folder's own.

    Raises:
        CheckpointError: none is intact; with what is wrong with each. The same on every rank.
    """

    def find_candidates() -> list[int]:
        root = place(folder)
        present = folders.saved_iterations(root)
        if not present or (iteration is None and folders.names_release(root)):
            return []
        wanted = iteration
        if wanted is None:
            try:
                wanted = latest_iteration(root, of=present)
            except CheckpointError as error:
                refused.append(f"the tracker file: {_short(error)}")
                return present[::-1]
        return [wanted, *(i for i in reversed(present) if i < wanted)]

    refused: list[str] = []
    # One list for all ranks, in case they do not see the same.
    candidates = run_on_rank0(
        ctx, f"looking for checkpoints in {folder}", lambda: (find_candidates(), refused)
    )
    wanted, refused = candidates
    if not wanted:
        return open_at(iteration)
    for at in wanted:
        try:
            opened = open_at(at)
            opened.verify_all()
        except CheckpointError as error:  # the same on every rank
            refused.append(f"iteration {at}: {_short(error)}")
            continue
        if refused:
            lines = "".join(f"\n    {line}" for line in refused)
            log.warning(
                f"*** --load-fallback previous: going on from iteration {at} in {folder}, because "
                f"what is newer cannot be used ***{lines}"
            )
        return opened
    raise CheckpointError(
        "no checkpoint in the folder is whole",
        found=f"{folder}: " + "\n    ".join(refused),
        fix="copy one again from where it is whole; nothing was changed here",
    )


def _short(error: CheckpointError) -> str:
    return f"{error.problem} ({' '.join(str(error.found).split())})"


@dataclass(frozen=True, slots=True, eq=False)
class NativeCheckpoint:
    """A checkpoint of our own format that all ranks agree on; an `OpenedCheckpoint`."""

    directory: Place
    manifest: Manifest
    ctx: ParallelContext
    verification: Verification
    hosts: tuple[str, ...] = field(repr=False)
    _checked: set[tuple[str, str]] = field(default_factory=set, repr=False)  # (host, file)

    @property
    def format_name(self) -> str:
        """The name of our own format."""
        return sharded.NAME

    @property
    def is_native(self) -> bool:
        """True: it is of our own format."""
        return True

    def check_resumable(self) -> None:
        """Do nothing: the manifest records the progress of the run."""

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def check_sizes(self) -> None:
        """Check this rank's share of its host's view of the files; does not communicate.

        Raises:
            CheckpointError: files are missing or of another length.
        """
        ranks_of_host = [
            r for r, host in enumerate(self.hosts) if host == self.hosts[self.ctx.rank]
        ]
        files = list(self.manifest.files)[ranks_of_host.index(self.ctx.rank) :: len(ranks_of_host)]
        if damages := verify.wrong_sizes(self.directory, self.manifest, files):
            raise verify.damage_error(self.directory, damages)

    def read_into(
        self,
        targets: Iterable[ShardedTensor],
        *,
        prefixes: tuple[str, ...] = ("",),
        cast: bool = False,
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Fill this rank's `targets` in place; as `OpenedCheckpoint.read_into`."""
        targets = list(targets)
        plans: list[ReadPlan] = []

        def plan() -> tuple[frozenset[str], frozenset[str]]:
            made = sharded.plan_read(self.directory, self.manifest, targets, cast=cast)
            plans.append(made)
            return frozenset(target.name for target in targets), made.files

        agreed = run_on_all_ranks(self.ctx, "matching the checkpoint with this run", plan)
        wanted = frozenset().union(*(names for names, _ in agreed))
        saved = filter(only, self.manifest.tensors)
        if extra := reshard.unexpected(saved, wanted, prefixes):
            raise reshard.mismatch_error(extra)
        self._verify([files for _, files in agreed], others=True)
        threads = threads_of_this_rank(self.hosts, self.ctx.rank)
        run_on_all_ranks(self.ctx, "reading the checkpoint", lambda: plans[0].fill(threads))

    def range_of(self, name: str) -> TensorRange | None:
        """Return where a whole tensor lies as it is: in one file on a disk; None otherwise."""
        return sharded.range_of(self.directory, self.manifest, name)

    def read_generators(self) -> GeneratorStates:
        """Return this rank's random states; call `rng.why_not_restorable` first.

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
        self._verify([{name} for name in saved], others=False)
        states: list[GeneratorStates] = []

        def read() -> None:
            states.append(sharded.read_generators(self.directory, self.manifest, self.ctx.rank))

        run_on_all_ranks(self.ctx, "reading the random states", read)
        return states[0]

    def verify_all(self) -> None:
        """Check the digest of every file once, distributed over the ranks.

        Raises:
            CheckpointError: a file is damaged.
        """
        self._verify([set() for _ in self.hosts], others=True)

    def _verify(self, needs: Iterable[Any], *, others: bool) -> None:
        """Check digests of what each rank `needs`, and of files that no rank needs if `others`."""
        if self.verification is Verification.SIZE:
            return
        left = [
            {name for name in need if (host, name) not in self._checked}
            for need, host in zip(needs, self.hosts)
        ]
        checked = {name for _, name in self._checked}
        sizes = {
            name: record.bytes
            for name, record in self.manifest.files.items()
            if any(name in need for need in left) or (others and name not in checked)
        }
        shares = verify.shares(sizes, left, self.hosts)

        def check() -> None:
            files, threads = shares[self.ctx.rank], threads_of_this_rank(self.hosts, self.ctx.rank)
            if damages := verify.wrong_digests(
                self.directory, self.manifest, files, threads=threads
            ):
                raise verify.damage_error(self.directory, damages)

        run_on_all_ranks(self.ctx, "checking the checkpoint's files", check)
        self._checked.update(
            (host, name) for host, names in zip(self.hosts, shares) for name in names
        )
