"""Saves a running job in Megatron-LM's layout: each model-parallel rank writes its own file.

Replica 0 writes its own stage and tensor-parallel part, which are those of Megatron's rank too.
Random states of all ranks and digests are stored beside the files, where Megatron ignores them. As
for our own format, all ranks agree, one rename commits, and the tracker comes last. Converting
afterwards (`tools/convert_checkpoint.py`) also changes the layout; this does not.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.boxes import Box, format_box, overlap
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord
from megatron.checkpoint.folder.retention import KEEP_ALL, Retention
from megatron.checkpoint.formats.megatron import writer as megatron_writer
from megatron.checkpoint.save.saving import Saved, run_on_rank0
from megatron.checkpoint.save.sealed_save import SealedSave
from megatron.checkpoint.sharded import Snapshot
from megatron.checkpoint.source import SourceBase, TensorDescription
from megatron.config.checkpoint import MegatronNames
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject
from megatron.mpu.context import ParallelContext

_GENERATOR_BYTES = 1 << 16  # of the random states of one rank


class LiveSource(SourceBase):
    """The state of one rank as a source: every tensor is described, its own parts can be read."""

    format_name = "live"
    directory = Path()

    def __init__(self, snapshot: Snapshot, described: Mapping[str, TensorDescription]) -> None:
        self._snapshot = snapshot
        self._mine = snapshot.by_name()
        self.tensors = described

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """The flags of the run."""
        return self._snapshot.config

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of the run."""
        return self._snapshot.progress

    @property
    def scalars(self) -> JsonObject:
        """The state of its engine beside tensors."""
        return self._snapshot.scalars

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`, if this rank holds them.

        Raises:
            CheckpointError: another rank holds them, so the layouts are not the same.
        """
        for part in self._mine[name].parts if name in self._mine else ():
            if overlap(part.box, box) == box:
                return part.view[box.within(part.box).slices].cpu()
        raise CheckpointError(
            "a rank does not hold what Megatron's file of this rank would",
            found=f"{name}{format_box(box)} is not, or not as one part, on this rank",
            fix="use --checkpoint-format sharded, and tools/convert_checkpoint.py on what it wrote",
        )


def save_megatron(
    folder: str,
    snapshot: Snapshot,
    *,
    iteration: int,
    ctx: ParallelContext,
    num_chunks: int,
    padded_rows: int,
    megatron_names: MegatronNames = MegatronNames.LEGACY,
    retention: Retention = KEEP_ALL,
) -> Saved:
    """Write `snapshot` into `folder` as Megatron would, and make it the latest there.

    All ranks call this together; on return it is durable.

    Args:
        num_chunks: virtual stages of each pipeline rank.
        padded_rows: rows of the vocabulary in the run, padding included.
        megatron_names: names of parameters in the files.

    Raises:
        CheckpointError: the same on every rank. The former checkpoint is as it was.
    """
    started = time.monotonic()
    described = _described(snapshot, ctx)
    source = LiveSource(snapshot, described)
    grid, run_folder = ctx.topology, Path(folder)
    layout = run_on_all_ranks(
        ctx,
        "planning Megatron's files",
        lambda: megatron_writer.file_layout(
            source,
            tp=grid.tp,
            pp=grid.pp,
            chunks=num_chunks,
            padded_rows=padded_rows,
            megatron_names=megatron_names,
        ),
    )[0]

    def make() -> str:
        folders.begin(run_folder)
        needed = megatron_writer.needed_bytes(described, layout)
        folders.require_space(run_folder, needed + ctx.world.size * _GENERATOR_BYTES)
        return folders.make_stage(run_folder, iteration).name

    stage = run_folder / run_on_rank0(ctx, "making room for the checkpoint", make)

    def write() -> Mapping[str, FileRecord]:
        if not ctx.dp_cp.is_first:
            return {}
        content = megatron_writer.rank_content(
            source,
            layout,
            tp=ctx.tp.rank,
            pp=ctx.pp.rank,
            iteration=iteration,
            optimizer=any(name.startswith("optimizer/") for name in described),
        )
        return megatron_writer.write_rank(stage, layout, content, tp=ctx.tp.rank, pp=ctx.pp.rank)

    save = SealedSave(
        ctx=ctx,
        stage=stage,
        snapshot=snapshot,
        iteration=iteration,
        retention=retention,
        started=started,
    )
    return save.complete(write, commit=lambda: megatron_writer.commit(stage, iteration))


def _described(snapshot: Snapshot, ctx: ParallelContext) -> dict[str, TensorDescription]:
    """Return dtype and shape of the tensors of all ranks."""
    own_tensors = {
        name: TensorDescription(tensor.dtype_code, tensor.global_shape)
        for name, tensor in snapshot.by_name().items()
    }
    offers = run_on_all_ranks(ctx, "describing what to save", lambda: own_tensors)
    return {name: known for offer in offers for name, known in offer.items()}
