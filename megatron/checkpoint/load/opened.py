"""A checkpoint of any format, opened by all ranks of a job.

All ranks determine its format together, once. Our own format is then read by its manifest
(`storage`), any other through its source (`foreign`).
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder.manifest import Manifest
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.format import Format
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.foreign import open_foreign
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor
from megatron.checkpoint.source import SourceOptions
from megatron.config.checkpoint import Verification
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext


class OpenedCheckpoint(Protocol):
    """A checkpoint that all ranks agree on; all call its methods together."""

    @property
    def directory(self) -> Place:
        """The checkpoint's own folder."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of our format, with the fields that this format has."""

    @property
    def ctx(self) -> ParallelContext:
        """The ranks that have opened it."""

    @property
    def format_name(self) -> str:
        """The name of its format in `formats.registry`."""

    @property
    def is_native(self) -> bool:
        """Whether it is of our own format, so that it records every flag of its run."""

    def check_resumable(self) -> None:
        """Raise CheckpointError if a run cannot continue in its data from here."""

    def verify_all(self) -> None:
        """Raise CheckpointError, the same on every rank, where a file is damaged."""

    def read_into(
        self,
        targets: Iterable[ShardedTensor],
        *,
        prefixes: tuple[str, ...] = ("",),
        cast: bool = False,
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Fill this rank's `targets` in place, from whatever layout they were saved at.

        Over all ranks the targets must be exactly the saved tensors under `prefixes` (default:
        all) that `only` names. `cast` permits another dtype than the saved one. Nothing is touched
        until names, shapes and files have been checked on all ranks.

        Raises:
            CheckpointError: names, shapes or dtypes do not match; a file is damaged or cannot be
                read (only then may targets be partly filled). The same on every rank.
        """

    def range_of(self, name: str) -> TensorRange | None:
        """Return where the whole tensor `name` lies as it is, row-major; None if nowhere.

        Does not communicate; files are verified by `verify_all`.

        Raises:
            CheckpointError: the file is damaged.
        """

    def read_generators(self) -> GeneratorStates:
        """Return this rank's random states; call `rng.why_not_restorable` first.

        Raises:
            CheckpointError: there are none for this rank, or they are damaged.
        """

    def close(self) -> None:
        """Close the files; no tensors can be read afterwards."""


def open_on_all_ranks(
    folder: str | Place,
    iteration: int | None = None,
    *,
    ctx: ParallelContext,
    options: SourceOptions,
    verification: Verification = Verification.FULL,
) -> OpenedCheckpoint:
    """Open the checkpoint of `iteration` in `folder` (None: the latest), the same on every rank.

    Raises:
        CheckpointError: missing, incomplete, damaged, or ranks see different ones. The same on
            every rank.
    """
    if format_on_all_ranks(folder, iteration, ctx=ctx).is_native:
        return storage.open_checkpoint(folder, iteration, ctx=ctx, verification=verification)
    return open_foreign(folder, iteration, ctx=ctx, options=options, verification=verification)


def format_on_all_ranks(
    folder: str | Place, iteration: int | None, *, ctx: ParallelContext
) -> Format:
    """Return the format of the checkpoint in `folder`, as every rank sees it.

    Raises:
        CheckpointError: ranks see different formats.
    """
    seen = run_on_all_ranks(
        ctx, f"looking at {folder}", lambda: registry.format_of(folder, iteration).name
    )
    if len(set(seen)) > 1:
        odd = next(rank for rank, name in enumerate(seen) if name != seen[0])
        raise CheckpointError(
            "ranks see different checkpoints in the same folder",
            found=f"rank 0 sees format {seen[0]}, rank {odd} sees {seen[odd]}; in {folder}",
            fix="put --load on a file system that all ranks see, or copy it to all nodes again",
        )
    return registry.get(seen[0])
