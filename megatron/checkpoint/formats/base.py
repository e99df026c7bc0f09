"""What a checkpoint format is: it plans and moves bytes on one rank.

A format never communicates, commits, or decides what to load: `storage` does the first two, the
program the last.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder.manifest import FileRecord, Manifest, SavedPiece
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot


class WritePlan(NamedTuple):
    """What one rank will write: `bytes` at most, and whatever the format needs to know."""

    bytes: int
    work: Any


class WrittenPart(NamedTuple):
    """What one rank has written: its files, and the pieces of tensors in them, by name."""

    files: Mapping[str, FileRecord]
    pieces: Mapping[str, tuple[SavedPiece, ...]]
    generators: str | None


class TensorDescription(NamedTuple):
    """What a whole tensor is, as all ranks agree."""

    dtype_code: str
    global_shape: tuple[int, ...]


class SharedPlan(NamedTuple):
    """Who writes what, the same on every rank; `tensors` are in the manifest's order."""

    ranks: Sequence[WritePlan]
    tensors: Mapping[str, TensorDescription]


class ReadPlan(NamedTuple):
    """What one rank will read: which `files`, and the call that fills the targets, in threads."""

    files: frozenset[str]
    fill: Callable[[int], None]


class CheckpointFormat(Protocol):
    """One way of laying a checkpoint out in files."""

    name: str

    def describe(self, snapshot: Snapshot) -> Any:
        """This rank's offer to the plan: names, shapes and sizes, without values; picklable."""

    def plan_write(self, offers: Sequence[Any]) -> SharedPlan:
        """Who writes what, from all ranks' offers in rank order. Pure."""

    def write(
        self, directory: Place, snapshot: Snapshot, plan: SharedPlan, *, rank: int
    ) -> WrittenPart:
        """Write this rank's part of the plan durably."""

    def share(self, snapshot: Snapshot, plan: SharedPlan, *, rank: int) -> Snapshot:
        """The snapshot with no more tensors than `write` reads on this rank."""

    def plan_read(
        self, directory: Place, manifest: Manifest, wanted: Iterable[ShardedTensor], *, cast: bool
    ) -> ReadPlan:
        """How the wanted tensors get filled in place; CheckpointError when they cannot be."""

    def read_generators(self, directory: Place, manifest: Manifest, rank: int) -> GeneratorStates:
        """The random states of rank `rank`."""

    def recognise(self, directory: Place) -> bool:
        """Whether the checkpoint in `directory` is of this format."""
