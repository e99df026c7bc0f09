"""The end of a save in another framework's layout: random states, the seal, rename, retention.

`formats.megatron.save` and `formats.deepspeed.save` write and name the files; the remaining steps
are those of our own format: all ranks agree, one rename commits, the tracker comes last.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import manifest, seal, verify
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import SEAL, FileRecord, GridLayout, Manifest
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.formats.native.sharded import (
    WrittenPart,
    check_replicas,
    digests,
    write_generators,
)
from megatron.checkpoint.save.saving import (
    Saved,
    manifest_of,
    planned,
    retire_older,
    run_on_rank0,
    writing,
)
from megatron.checkpoint.sharded import Snapshot
from megatron.errors import MegatronError
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSave:
    """A save with its stage; `started` is by the monotonic clock."""

    ctx: ParallelContext
    stage: Path
    snapshot: Snapshot
    iteration: int
    retention: Retention
    started: float

    def complete(
        self,
        write: Callable[[], Mapping[str, FileRecord]],
        *,
        commit: Callable[[], Path],
        check: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Write, seal and commit, by all ranks together.

        Args:
            write: writes this rank's files into the stage; their records by name.
            commit: makes the stage a checkpoint and names it in the trackers (rank 0).
            check: checks the files of all ranks and raises if they are wrong (rank 0).

        Raises:
            CheckpointError: the same on every rank; nothing of the stage is left.
            NumericsError: the same: what several ranks hold differs between two of them.
        """
        ctx, stage = self.ctx, self.stage
        try:
            replicated = planned(self.snapshot, ctx=ctx).replicated

            def write_and_digest() -> WrittenPart:
                part = self.write_part(write())
                # Another framework decides who writes what, so that all holders are compared.
                return part._replace(digests=digests(self.snapshot, replicated))

            parts = run_on_all_ranks(ctx, writing(self.iteration), write_and_digest)
            check_replicas(parts)
            content = manifest_of(
                self.snapshot,
                parts,
                iteration=self.iteration,
                layout=GridLayout.of(ctx.topology),
                tensors={},  # the other framework's files define their pieces
            )
            run_on_rank0(ctx, "reading the checkpoint back", lambda: self.put(content, check))
        except MegatronError:  # the same on all ranks, so none is still writing
            run_on_rank0(ctx, "removing what was written", lambda: folders.remove(stage))
            raise
        directory = run_on_rank0(ctx, "putting the checkpoint in place", commit)
        retired = run_on_rank0(
            ctx,
            "removing older checkpoints",
            lambda: retire_older(directory.parent, self.retention, newest=self.iteration),
        )
        seconds = time.monotonic() - self.started
        return Saved(self.iteration, directory, content.bytes, seconds, seconds, retired)

    def write_part(self, files: Mapping[str, FileRecord]) -> WrittenPart:
        """Add this rank's random states to the `files` that it has written.

        If an older checkpoint may be deleted because of this one, all of them are read back.
        """
        made, generators, states = dict(files), None, self.snapshot.generators
        if states is not None:
            generators = f"generators-{self.ctx.rank:05d}.safetensors"
            made[generators] = write_generators(self.stage / generators, states)
        if self.retention.last is not None:
            verify.read_back(self.stage, made)
        return WrittenPart(made, {}, generators)

    def put(self, content: Manifest, check: Callable[[], None]) -> None:
        """Check on rank 0 that every file has its size and `check` accepts them, then seal them."""
        seal.check_lengths(self.stage, content)
        check()
        text = manifest.encode(content)
        manifest.decode(text, self.stage / SEAL)
        durable.write_file(self.stage / SEAL, text)
