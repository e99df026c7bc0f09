"""A local checkpoint that all ranks have agreed on: each reads its own state, from its own node."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import reshard
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.folder.manifest import Manifest
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.sharded import ReadPlan
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True, eq=False)
class OpenedLocal:
    """One save of all ranks; an `OpenedCheckpoint` whose bytes have been verified already.

    `directory` and `manifest` are those of this rank's state, which `threads` read.
    """

    directory: Path
    manifest: Manifest
    ctx: ParallelContext
    threads: int

    @property
    def format_name(self) -> str:
        """The name of our own format, since the files are of it."""
        return sharded.NAME

    @property
    def is_native(self) -> bool:
        """True: it records every flag of its run."""
        return True

    def check_resumable(self) -> None:
        """Do nothing: it records the progress of the run."""

    def verify_all(self) -> None:
        """Do nothing: no rank has opened a damaged one."""

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

        def plan() -> None:
            plans.append(sharded.plan_read(self.directory, self.manifest, targets, cast=cast))
            saved, wanted = filter(only, self.manifest.tensors), {one.name for one in targets}
            if extra := reshard.unexpected(saved, wanted, prefixes):
                raise reshard.mismatch_error(extra)

        run_on_all_ranks(self.ctx, "matching the local checkpoint with this run", plan)
        doing = "reading the local checkpoint"
        run_on_all_ranks(self.ctx, doing, lambda: plans[0].fill(self.threads))

    def range_of(self, name: str) -> TensorRange | None:
        """Return None: these files are removed when a newer state has been saved."""
        return None

    def read_generators(self) -> GeneratorStates:
        """Return this rank's random states."""
        return sharded.read_generators(self.directory, self.manifest, 0)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""
