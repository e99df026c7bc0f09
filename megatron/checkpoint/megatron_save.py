"""A running job saves in Megatron-LM's layout: each model-parallel rank writes the file of its own.

Replica 0 writes, from what it holds: its stage and its tensor-parallel part are the ones that
Megatron would have there too. One verdict, one rename, the tracker last, as for our own format.
Converting afterwards (`tools/convert_checkpoint.py`) also changes the layout; this does not.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint import folder as folders
from megatron.checkpoint.agreement import together
from megatron.checkpoint.boxes import Box, describe, overlap
from megatron.checkpoint.formats import megatron_writer
from megatron.checkpoint.formats.base import TensorDescription
from megatron.checkpoint.saving import Saved, on_first, writing
from megatron.checkpoint.sharded import Snapshot
from megatron.checkpoint.source import SourceBase
from megatron.errors import CheckpointError, MegatronError
from megatron.mpu.context import ParallelContext


class LiveSource(SourceBase):
    """What one rank holds of a run, as a source: every tensor is described, its own can be read."""

    format_name = "live"
    directory = Path()

    def __init__(self, snapshot: Snapshot, described: Mapping[str, TensorDescription]) -> None:
        self._snapshot = snapshot
        self._mine = snapshot.by_name()
        self.tensors = described

    @property
    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """The flags of the run."""
        return self._snapshot.config

    @property
    def progress(self) -> Mapping[str, Any]:
        """How far it is."""
        return self._snapshot.progress

    @property
    def scalars(self) -> Mapping[str, Any]:
        """What its engine keeps beside tensors."""
        return self._snapshot.scalars

    def read(self, name: str, box: Box) -> Tensor:
        """The elements `box` of `name`, where this rank holds them.

        Raises:
            CheckpointError: another rank holds them, so the layouts are not the same.
        """
        for part in self._mine[name].parts if name in self._mine else ():
            if overlap(part.box, box) == box:
                return part.view[box.within(part.box).slices].cpu()
        raise CheckpointError(
            "a rank does not hold what Megatron's file of this rank would",
            found=f"{name}{describe(box)} is not, or not as one part, on this rank",
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
) -> Saved:
    """Write `snapshot` into `folder` as Megatron would, and make it the latest there.

    All ranks call this together; on return it is durable.

    Args:
        num_chunks: virtual stages of each pipeline rank.
        padded_rows: rows of the vocabulary in the run, padding included.

    Raises:
        CheckpointError: the same on every rank. The former checkpoint is as it was.
    """
    started = time.monotonic()
    mine = {
        name: TensorDescription(tensor.dtype_code, tensor.global_shape)
        for name, tensor in snapshot.by_name().items()
    }
    offers = together(ctx, "describing what to save", lambda: mine)
    described = {name: known for offer in offers for name, known in offer.items()}
    source = LiveSource(snapshot, described)
    grid = ctx.topology

    layout = together(
        ctx,
        "planning Megatron's files",
        lambda: megatron_writer.file_layout(
            source, tp=grid.tp, pp=grid.pp, chunks=num_chunks, padded_rows=padded_rows
        ),
    )[0]
    there = Path(folder)

    def make() -> str:
        folders.begin(there)
        folders.require_space(there, megatron_writer.needed_bytes(described, layout))
        return folders.make_stage(there, iteration).name

    stage = there / on_first(ctx, "making room for the checkpoint", make)

    def write() -> int:
        if not ctx.dp.is_first:
            return 0
        content = megatron_writer.rank_content(
            source,
            layout,
            tp=ctx.tp.rank,
            pp=ctx.pp.rank,
            iteration=iteration,
            optimizer=any(name.startswith("optimizer/") for name in described),
        )
        return megatron_writer.write_rank(stage, layout, content, tp=ctx.tp.rank, pp=ctx.pp.rank)

    try:
        sizes = together(ctx, writing(iteration), write)
    except MegatronError:
        on_first(ctx, "removing what was written", lambda: folders.remove(stage))
        raise
    directory = on_first(
        ctx, "putting the checkpoint in place", lambda: megatron_writer.commit(stage, iteration)
    )
    seconds = time.monotonic() - started
    return Saved(iteration, directory, sum(sizes), seconds, seconds, ())
