"""Loads a checkpoint of another format into a running job, with the interface of our own.

Each rank opens the source and reads only its own parts, after all ranks agree on the content and on
every check. Only a checkpoint that a run of ours wrote has random states, and one without optimizer
state can only start a run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.checkpoint import reshard
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder.manifest import GridLayout, Manifest, SavedTensor
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.load.source_config import completed_progress
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, by_name
from megatron.checkpoint.source import CheckpointSource, SourceOptions
from megatron.config.checkpoint import Verification
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext


class _RankView(NamedTuple):
    """The checkpoint as one rank sees it: digests of its description, without values."""

    directory: str
    tensors: str
    facts: str


def open_foreign(
    folder: str | Place,
    iteration: int | None = None,
    *,
    ctx: ParallelContext,
    options: SourceOptions,
    verification: Verification = Verification.FULL,
) -> "ForeignCheckpoint":
    """Return the checkpoint of another format in `folder`, the same one on every rank.

    Raises:
        CheckpointError: missing, incomplete, or ranks see different ones. The same on every rank.
    """
    opened: list[CheckpointSource] = []

    def open_on_this_rank() -> _RankView:
        source = registry.open_source(Path(str(folder)), iteration, options=options)
        opened.append(source)
        facts = [source.format_name, source.config, source.progress, source.scalars]
        return _RankView(source.directory.name, _digest(dict(source.tensors)), _digest(facts))

    seen = run_on_all_ranks(ctx, f"opening the checkpoint in {folder}", open_on_this_rank)
    for rank, other in enumerate(seen):
        if other != seen[0]:
            names = [name for name, a, b in zip(_RankView._fields, seen[0], other) if a != b]
            raise CheckpointError(
                "ranks see different checkpoints in the same folder",
                found=f"{', '.join(names)} of rank {rank} differ from rank 0's; in {folder}",
                fix="put --load on a file system that all ranks see, or copy it to all nodes again",
            )
    return ForeignCheckpoint(opened[0], _as_manifest(opened[0]), ctx, verification)


def _digest(values: object) -> str:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _as_manifest(source: CheckpointSource) -> Manifest:
    """Return the manifest of our format, with the fields that this checkpoint has."""
    iteration = int(source.progress.get("iteration", 0))
    # A run of ours that saved in another format wrote a manifest beside the files.
    seal = source.seal
    return Manifest(
        iteration=iteration,
        layout=GridLayout(tp=1, pp=1, dp=1) if seal is None else seal.layout,
        progress=completed_progress(source, iteration),
        scalars=source.scalars,
        config=source.config,
        tensors={
            name: SavedTensor(known.dtype_code, known.global_shape, ())
            for name, known in source.tensors.items()
        },
        files={},
        generators=() if seal is None else seal.generators,
        written_by={} if seal is None else seal.written_by,
        created="" if seal is None else seal.created,
        data={} if seal is None else seal.data,
        model_kind=source.kind,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCheckpoint:
    """A source that all ranks agree on; an `OpenedCheckpoint`."""

    source: CheckpointSource
    manifest: Manifest
    ctx: ParallelContext
    verification: Verification
    _verified: list[bool] = field(default_factory=list, repr=False)

    @property
    def directory(self) -> Path:
        """The checkpoint's own folder."""
        return self.source.directory

    @property
    def format_name(self) -> str:
        """The name of its format."""
        return self.source.format_name

    @property
    def is_native(self) -> bool:
        """False: it is of another format."""
        return False

    def check_resumable(self) -> None:
        """Raise CheckpointError where the position of the run in its data is unknown."""
        known = self.source.progress
        if int(known.get("iteration", 0)) and "consumed_samples" not in known:
            raise CheckpointError(
                "the checkpoint does not record how many samples its run had consumed",
                found=f"{self.directory} at iteration {known['iteration']}",
                fix="add --finetune to begin a run with these weights",
            )

    def read_into(
        self,
        targets: Iterable[ShardedTensor],
        *,
        prefixes: tuple[str, ...] = ("",),
        cast: bool = False,
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Fill this rank's `targets` in place; as `OpenedCheckpoint.read_into`."""
        wanted = by_name(list(targets))
        run_on_all_ranks(
            self.ctx, "matching the checkpoint with this run", lambda: self._match(wanted, cast)
        )
        named = run_on_all_ranks(self.ctx, "naming what is read", lambda: frozenset(wanted))
        saved = filter(only, self.manifest.tensors)
        if extra := reshard.unexpected(saved, frozenset().union(*named), prefixes):
            raise reshard.mismatch_error(extra)
        self.verify_all()
        run_on_all_ranks(
            self.ctx, "reading the checkpoint", lambda: self._fill(list(wanted.values()))
        )

    def range_of(self, name: str) -> TensorRange | None:
        """Return where a whole tensor lies as it is; None if nowhere."""
        return self.source.range_of(name)

    def verify_all(self) -> None:
        """Check every file once, distributed over the ranks, as far as the format allows.

        Raises:
            CheckpointError: a file is damaged. The same on every rank.
        """
        if self._verified or self.verification is not Verification.FULL:
            return
        share, of = self.ctx.rank, self.ctx.world.size
        run_on_all_ranks(
            self.ctx,
            "checking the checkpoint's files",
            lambda: self.source.verify(share=share, of=of),
        )
        self._verified.append(True)

    def read_generators(self) -> GeneratorStates:
        """Return this rank's random states; call `rng.why_not_restorable` first.

        Raises:
            CheckpointError: they are damaged. The same on every rank.
        """
        states: list[GeneratorStates] = []

        def read() -> None:
            states.append(sharded.read_generators(self.directory, self.manifest, self.ctx.rank))

        run_on_all_ranks(self.ctx, "reading the random states", read)
        return states[0]

    def close(self) -> None:
        """Close the files."""
        self.source.close()

    def _match(self, wanted: dict[str, ShardedTensor], cast: bool) -> None:
        has_state = any(name.startswith("optimizer/") for name in self.manifest.tensors)
        if not has_state and any(name.startswith("optimizer/") for name in wanted):
            raise CheckpointError(
                "the checkpoint holds weights alone, and the run is to go on with its optimizer",
                found=f"{self.directory}, format {self.source.format_name}",
                fix="add --finetune to begin a run with these weights, or --no-load-optim",
            )
        if problems := reshard.mismatches(self.source.tensors, wanted, cast=cast):
            raise reshard.mismatch_error(problems)

    @torch.no_grad()
    def _fill(self, targets: Sequence[ShardedTensor]) -> None:
        for target in targets:
            for part in target.parts:
                part.view.copy_(self.source.read(target.name, part.box))
            target.zero_padding()
