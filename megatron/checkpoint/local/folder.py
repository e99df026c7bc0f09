"""A node's folder of local checkpoints: the states of its ranks, and those it holds for others.

A state appears by one rename, as a checkpoint does. One process writes the states of one owner to
one folder at a time. `layout` draws the folder.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from megatron import atomic
from megatron.checkpoint.files.durable import write_file
from megatron.checkpoint.folder import manifest, run_folder, verify
from megatron.checkpoint.folder.manifest import GridLayout, Manifest
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.local.layout import owner_name, states_in
from megatron.checkpoint.local.recovery import CopyKey
from megatron.checkpoint.save.saving import manifest_of, saved_tensors
from megatron.checkpoint.sharded import Snapshot
from megatron.errors import CheckpointError
from megatron.host import SHARED_MEMORY, available_memory_bytes, free_bytes

_MARK = ".seen-by-"  # beginnings of names of files by which ranks tell whose folder they see
_OWN_BYTES = 1 << 20  # of a state, beside its tensors
FACTS = "local checkpoint"  # the key of a manifest's config that holds the `Facts`


class Facts(NamedTuple):
    """What a state records beside what every checkpoint does.

    Attributes:
        owner: the rank whose state it is.
        save: a random word that is the same on all ranks.
        persistent: the iteration that was the last one in --save; 0: none.
    """

    owner: int
    save: str
    persistent: int


class StoredState(NamedTuple):
    """One rank's state in a folder; `persistent` is that of its `Facts`."""

    key: CopyKey
    persistent: int
    directory: Path
    manifest: Manifest


class LocalFolder:
    """The part of the folder that is of one run of `world` ranks; does not communicate."""

    def __init__(self, root: Path, run: str, world: int) -> None:
        self.root, self.path, self._world = root, root / run, world

    def make(self) -> None:
        """Make it, for this user alone: it is in memory that all users of a node share."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def mark(self, rank: int, word: str) -> None:
        """Leave a mark of `rank`, that other ranks see who see this folder."""
        write_file(self.path / f"{_MARK}{word}-{rank}", b"")

    def marks(self, word: str) -> list[int]:
        """Return the ranks that left a mark, in order."""
        beginning = f"{_MARK}{word}-"
        names = [entry.name for entry in self.path.iterdir()]
        return sorted(int(name[len(beginning) :]) for name in names if name.startswith(beginning))

    def unmark(self, rank: int) -> None:
        """Remove the marks of `rank`, and those that a process before it left."""
        for entry in self.path.glob(f"{_MARK}*-{rank}"):
            entry.unlink(missing_ok=True)

    def states(self) -> list[tuple[int, int]]:
        """Return owners and iterations of what is here, of runs of as many ranks."""
        lying = states_in(self.path)
        return sorted((one.owner, one.iteration) for one in lying if one.world == self._world)

    def directory(self, owner: int, iteration: int) -> Path:
        """Return the folder of one state."""
        return self._of(owner) / run_folder.iteration_name(iteration)

    def stage(self, owner: int, iteration: int) -> Path:
        """Return a new hidden folder for a state; remains of earlier ones are removed."""
        run_folder.begin(self._of(owner))
        return run_folder.make_stage(self._of(owner), iteration)

    def write(
        self, snapshot: Snapshot, iteration: int, *, layout: GridLayout, facts: Facts
    ) -> None:
        """Write the state of a rank.

        Raises:
            OSError: there is no room for it.
        """
        plan = sharded.plan_alone(snapshot)
        stage = self.stage(facts.owner, iteration)
        part = sharded.write(stage, snapshot, plan, rank=0)
        content = manifest_of(
            snapshot,
            [part],
            iteration=iteration,
            layout=layout,
            tensors=saved_tensors(plan, [part]),
            beside={FACTS: facts._asdict()},
        )
        write_file(stage / manifest.PART, manifest.encode(content))
        self.put_in_place(stage, iteration)

    def put_in_place(self, stage: Path, iteration: int) -> None:
        """Give a whole stage its name; a state of this iteration is replaced."""
        run_folder.publish(stage, run_folder.iteration_name(iteration), {})

    def keep_only(self, owner: int, iteration: int) -> None:
        """Remove the states of `owner` but that of `iteration`."""
        for found in run_folder.iterations(self._of(owner)):
            if found != iteration:
                shutil.rmtree(self.directory(owner, found))
        atomic.sync_directory(self._of(owner))

    def remove_owner(self, owner: int) -> None:
        """Remove all states of `owner`, if there are some, and the folders that are empty then."""
        if self._of(owner).exists():
            shutil.rmtree(self._of(owner))
        for path in (self.path, self.root):
            try:
                path.rmdir()
            except OSError:  # others are still in it
                return

    def room(self) -> int:
        """Return how many bytes states may take here, with those that are here already."""
        free = free_bytes(self.path)
        in_memory = SHARED_MEMORY.exists() and (
            self.path.stat().st_dev == SHARED_MEMORY.stat().st_dev
        )
        left = available_memory_bytes() if in_memory else None
        taken = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        return taken + (free if left is None else min(free, left))

    def _of(self, owner: int) -> Path:
        return self.path / owner_name(owner, self._world)


def stored_state(owner: int, directory: Path) -> StoredState:
    """Return the state in `directory` by its manifest.

    Raises:
        CheckpointError: that is damaged, or of another rank.
        OSError: there is none.
    """
    content = manifest.load_part(directory)
    try:
        facts = Facts(**content.config.get(FACTS, {}))  # type: ignore[arg-type]
    except TypeError:
        facts = None
    if facts is None or facts.owner != owner:
        raise CheckpointError(
            "a local checkpoint is not of the rank in whose folder it lies",
            found=f"{directory}: {facts or 'it does not say of which'}",
            fix="remove it; the last checkpoint in --save is loaded then",
        )
    key = CopyKey(content.iteration, facts.save, owner)
    return StoredState(key, facts.persistent, directory, content)


def verified_state(owner: int, directory: Path, *, threads: int) -> StoredState:
    """Return the state in `directory`, all of whose bytes have been compared with their digests.

    Raises:
        CheckpointError: it is damaged, or of another rank.
        OSError: there is none.
    """
    state = stored_state(owner, directory)
    content = state.manifest
    if damages := verify.wrong_digests(directory, content, content.files, threads=threads):
        raise verify.damage_error(directory, damages)
    return state


def bytes_of(snapshot: Snapshot) -> int:
    """Return bytes that the state of such a snapshot takes, a little more at most."""
    return sharded.plan_alone(snapshot).ranks[0].bytes + _OWN_BYTES
